/* LD_PRELOAD: a system that refuses. The tests' side is refusing_kit.py.
 *
 * REFUSE_FILE names a page of rows, 32 bytes each: the call's name (20 bytes, zero-ended), errno,
 * how many calls go well before, how many are refused then (int32 each; negative: all). A row of
 * errno 0 refuses nothing. REFUSE_IN: only in processes whose command line holds this text.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define ROWS 64
struct row { char name[20]; int32_t error, before, count; };
static struct row *rows;

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("REFUSE_FILE"), *in = getenv("REFUSE_IN");
    static char line[1 << 16];
    if (!file || rows) return;
    if (in && *in) {
        int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? -1 : read(fd, line, sizeof line - 1);
        if (fd >= 0) close(fd);
        for (ssize_t i = 0; i < n; i++) if (!line[i]) line[i] = ' ';
        if (n <= 0 || !memmem(line, (size_t)n, in, strlen(in))) return;
    }
    int fd = open(file, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *at = mmap(NULL, ROWS * sizeof *rows, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) rows = at;
}

static int refuses(const char *name) {
    if (!rows) return 0;
    for (int i = 0; i < ROWS && rows[i].name[0]; i++) {
        struct row *r = rows + i;
        if (!r->error || strcmp(r->name, name)) continue;
        if (r->before > 0) { __sync_fetch_and_sub(&r->before, 1); continue; }
        if (!r->count) continue;
        if (r->count > 0) __sync_fetch_and_sub(&r->count, 1);
        return r->error;
    }
    return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define REFUSED(label) { int e_ = refuses(label); if (e_) { errno = e_; return -1; } }
#define MODE(flags, mode) int mode = 0; if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, int); va_end(a); }

/* Reading is not writing: a full disk refuses nothing that is only read. */
int open64(const char *p, int flags, ...) { MODE(flags, m) REFUSED((flags & O_ACCMODE) == O_RDONLY ? "open" : "create") return REAL(open64)(p, flags, m); }
int openat64(int d, const char *p, int flags, ...) { MODE(flags, m) REFUSED((flags & O_ACCMODE) == O_RDONLY ? "open" : "create") return REAL(openat64)(d, p, flags, m); }
int mkdir(const char *p, mode_t m) { REFUSED("mkdir") return REAL(mkdir)(p, m); }
int rename(const char *a, const char *b) { REFUSED("rename") return REAL(rename)(a, b); }
int unlink(const char *p) { REFUSED("unlink") return REAL(unlink)(p); }
/* errno -1: a disk that says it is done and has done nothing. */
int fsync(int fd) { int e = refuses("fsync"); if (e) { errno = e; return e < 0 ? 0 : -1; } return REAL(fsync)(fd); }
int fdatasync(int fd) { int e = refuses("fdatasync"); if (e) { errno = e; return e < 0 ? 0 : -1; } return REAL(fdatasync)(fd); }
ssize_t write(int fd, const void *b, size_t n) {
    struct stat s; /* of files only: a pipe is no disk */
    if (rows && n && !fstat(fd, &s) && S_ISREG(s.st_mode)) REFUSED("write")
    return REAL(write)(fd, b, n);
}
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { REFUSED("write") return REAL(pwrite64)(fd, b, n, o); }
ssize_t read(int fd, void *b, size_t n) {
    struct stat s;
    if (rows && n && !fstat(fd, &s) && S_ISREG(s.st_mode)) REFUSED("read")
    return REAL(read)(fd, b, n);
}
/* "send_unix": to processes of this machine, what wakes a loop included. */
static const char *way_of(int fd) {
    int domain = 0; socklen_t n = sizeof domain;
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n) || domain != AF_UNIX ? "send" : "send_unix";
}
ssize_t send(int fd, const void *b, size_t n, int f) { if (rows) REFUSED(way_of(fd)) return REAL(send)(fd, b, n, f); }
ssize_t sendto(int fd, const void *b, size_t n, int f, const struct sockaddr *a, socklen_t l) { if (rows) REFUSED(way_of(fd)) return REAL(sendto)(fd, b, n, f, a, l); }
ssize_t sendmsg(int fd, const struct msghdr *m, int f) { if (rows) REFUSED(way_of(fd)) return REAL(sendmsg)(fd, m, f); }
int ftruncate64(int fd, off64_t n) { REFUSED("ftruncate") return REAL(ftruncate64)(fd, n); }
int posix_fallocate64(int fd, off64_t o, off64_t n) { int e = refuses("fallocate"); return e ? e : REAL(posix_fallocate64)(fd, o, n); }
int flock(int fd, int op) { REFUSED("flock") return REAL(flock)(fd, op); }
int memfd_create(const char *n, unsigned f) { REFUSED("memfd_create") return REAL(memfd_create)(n, f); }
void *mmap64(void *a, size_t n, int p, int f, int fd, off64_t o) {
    if (fd >= 0 && (f & MAP_SHARED)) { int e = refuses("mmap"); if (e) { errno = e; return MAP_FAILED; } }
    return REAL(mmap64)(a, n, p, f, fd, o);
}
int socket(int d, int t, int p) { REFUSED(d == AF_UNIX ? "socket_unix" : d == AF_INET || d == AF_INET6 ? "socket" : "socket_other") return REAL(socket)(d, t, p); }
int socketpair(int d, int t, int p, int v[2]) { REFUSED("socketpair") return REAL(socketpair)(d, t, p, v); }
int bind(int fd, const struct sockaddr *a, socklen_t n) { REFUSED("bind") return REAL(bind)(fd, a, n); }
int listen(int fd, int n) { REFUSED("listen") return REAL(listen)(fd, n); }
int accept4(int fd, struct sockaddr *a, socklen_t *n, int f) { REFUSED("accept") return REAL(accept4)(fd, a, n, f); }
int connect(int fd, const struct sockaddr *a, socklen_t n) { REFUSED("connect") return REAL(connect)(fd, a, n); }
int epoll_create1(int f) { REFUSED("epoll") return REAL(epoll_create1)(f); }
int pipe2(int v[2], int f) { REFUSED("pipe") return REAL(pipe2)(v, f); }
int statvfs64(const char *p, struct statvfs64 *s) { REFUSED("statvfs") return REAL(statvfs64)(p, s); }
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x) {
    int e = refuses("thread");
    return e ? e : REAL(pthread_create)(t, a, f, x);
}
