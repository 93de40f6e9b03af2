/* Means of sorted columns (coordinate.py), a strip of columns at a time so that all rows of it stay in the first-level cache.

   Bits: minima and maxima are exact; sums are double, from +0, in the order of coordinate.py; built with -ffp-contract=off. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define STRIP 64 /* values: 256 bytes of a row */

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WIDE __attribute__((target_clones("avx2", "default")))
#endif
#else
#define WIDE
#endif

/* rows: n of ``width`` values, ``stride`` apart; steps: pairs of rows to put in order; scratch: n * STRIP values. The mean of the sorted values
   low to high - 1 and, for each s < window, of the s-th or the one n - window places above it, whichever is nearer to the median. */
WIDE void atoll_sorted_mean(const float *rows, size_t stride, size_t n, size_t width, const uint16_t *steps, size_t count, size_t low, size_t high,
                            size_t window, float *restrict scratch, float *restrict out)
{
    const double divisor = (double)(high - low + window);
    for (size_t start = 0; start < width; start += STRIP) {
        const size_t length = width - start < STRIP ? width - start : STRIP;
        double sums[STRIP] = {0}, centre[STRIP];
        for (size_t i = 0; i < n; i++) {
            const float *row = rows + i * stride + start;
            memcpy(scratch + i * STRIP, row, 4 * length);
            for (size_t k = 0; k < STRIP; k += 16)
                __builtin_prefetch(row + STRIP + k);
        }
        for (size_t c = 0; c < count; c++) {
            float *a = scratch + steps[2 * c] * STRIP, *b = scratch + steps[2 * c + 1] * STRIP;
            for (size_t k = 0; k < STRIP; k++) {
                const float x = a[k], y = b[k];
                a[k] = x < y ? x : y;
                b[k] = x < y ? y : x;
            }
        }
        for (size_t i = low; i < high; i++)
            for (size_t k = 0; k < STRIP; k++)
                sums[k] += scratch[i * STRIP + k];
        const float *one = scratch + (n - 1) / 2 * STRIP, *two = scratch + n / 2 * STRIP;
        for (size_t k = 0; window && k < STRIP; k++)
            centre[k] = ((double)one[k] + two[k]) * 0.5;
        for (size_t s = 0; s < window; s++) {
            const float *below = scratch + s * STRIP, *above = scratch + (s + n - window) * STRIP;
            for (size_t k = 0; k < STRIP; k++)
                sums[k] += centre[k] - below[k] > above[k] - centre[k] ? above[k] : below[k];
        }
        for (size_t k = 0; k < length; k++)
            out[start + k] = (float)(sums[k] / divisor);
    }
}
