/* A delay line for IP packets: every packet that the kernel routes into a TUN device comes out of it again after a fixed time.
 *
 *     router DEVICE DELAY_US
 *
 * It says "ready fifo" or "ready" on stdout once the device exists ("fifo": it runs under SCHED_FIFO, so that other load on the machine
 * does not stretch the delay), and ends when its stdin ends, in whatever way whoever started it has ended. Packets keep their order. A full
 * queue drops the newest packet, as a router does. Loss and rates are not its business: nftables and token buckets do them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 16384u /* a power of two; at 1500 bytes 24 MB, that is 25 ms of 8 Gbit/s */
#define MTU 1600
#define BURST 64

struct packet {
    uint64_t due;
    uint16_t length;
    unsigned char data[MTU];
};

static struct packet queue[SLOTS];

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int open_tun(const char *name) {
    struct ifreq request;
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) < 0) {
        perror("router: /dev/net/tun");
        exit(1);
    }
    return fd;
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: router DEVICE DELAY_US\n");
        return 64;
    }
    int tun = open_tun(arguments[1]);
    uint64_t delay = strtoull(arguments[2], NULL, 10) * 1000u;
    struct sched_param priority = {.sched_priority = 1};
    int fifo = sched_setscheduler(0, SCHED_FIFO, &priority) == 0;
    prctl(PR_SET_TIMERSLACK, 1);
    printf(fifo ? "ready fifo\n" : "ready\n");
    fflush(stdout);

    uint32_t head = 0, tail = 0; /* head: the oldest packet; both count up and wrap */
    static unsigned char surplus[MTU];
    for (;;) {
        uint64_t now = now_ns();
        while (head != tail && queue[head % SLOTS].due <= now) {
            struct packet *packet = &queue[head % SLOTS];
            if (write(tun, packet->data, packet->length) < 0 && errno == EAGAIN)
                break;
            head++;
        }
        int arrived = 0;
        for (; arrived < BURST; arrived++) {
            int full = tail - head == SLOTS;
            struct packet *packet = &queue[tail % SLOTS];
            ssize_t length = read(tun, full ? surplus : packet->data, MTU);
            if (length <= 0)
                break;
            if (!full) {
                packet->length = (uint16_t)length;
                packet->due = now_ns() + delay;
                tail++;
            }
        }
        if (arrived == BURST)
            continue;
        struct pollfd watched[2] = {{.fd = tun, .events = POLLIN}, {.fd = STDIN_FILENO, .events = POLLIN}};
        struct timespec wait, *limit = NULL;
        if (head != tail) {
            int64_t left = (int64_t)(queue[head % SLOTS].due - now_ns());
            if (left < 0)
                left = 0;
            wait.tv_sec = left / 1000000000;
            wait.tv_nsec = left % 1000000000;
            limit = &wait;
        }
        ppoll(watched, 2, limit, NULL);
        char ignored[64];
        if (watched[1].revents && read(STDIN_FILENO, ignored, sizeof ignored) <= 0)
            return 0;
    }
}
