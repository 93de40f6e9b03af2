/* Means of sorted columns (coordinate.py), a strip of columns at a time so that all rows of it stay in the first-level cache; sums of squares
   (gram.py); products of small matrices (numbers.py); Gram matrices (triangle.py).

   Bits: minima and maxima are exact; sums are double, from +0, in the order of the Python beside them; built with -ffp-contract=off. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define STRIP 64 /* values: 256 bytes of a row */
#define LANES 64 /* as in triangle.py */
#define TILE 512 /* values: 4 KiB of a row in double */
#define AHEAD 1024 /* values that are fetched before they are needed */

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

/* sums[k]: of the squares of a row's values k, k + STRIP, k + 2 STRIP, ..., less those of origin, which may be null. */
static inline __attribute__((always_inline)) void sum_squares(const float *row, size_t width, const float *origin, double *sums)
{
    double lanes[STRIP] = {0};
    size_t start = 0;
    for (; start + STRIP <= width; start += STRIP) {
        for (size_t k = 0; k < STRIP; k += 16)
            __builtin_prefetch(row + start + AHEAD + k);
        for (size_t k = 0; k < STRIP; k++) {
            const double x = origin ? (double)row[start + k] - origin[start + k] : row[start + k];
            lanes[k] += x * x;
        }
    }
    for (size_t k = 0; start + k < width; k++) {
        const double x = origin ? (double)row[start + k] - origin[start + k] : row[start + k];
        lanes[k] += x * x;
    }
    memcpy(sums, lanes, sizeof lanes);
}

WIDE void atoll_squares(const float *rows, size_t stride, size_t n, size_t width, const float *origin, double *restrict sums)
{
    for (size_t i = 0; i < n; i++)
        if (origin)
            sum_squares(rows + i * stride, width, origin, sums + i * STRIP);
        else
            sum_squares(rows + i * stride, width, NULL, sums + i * STRIP);
}

/* Rows longer than ``longest`` are shortened to it, in place, each while it is in the cache. */
WIDE void atoll_clip(float *rows, size_t stride, size_t n, size_t width, double longest)
{
    for (size_t i = 0; i < n; i++) {
        float *row = rows + i * stride;
        double sums[STRIP];
        sum_squares(row, width, NULL, sums);
        for (size_t half = STRIP / 2; half; half /= 2)
            for (size_t k = 0; k < half; k++)
                sums[k] += sums[half + k];
        const double length = sqrt(sums[0]);
        const float factor = (float)(longest / (length > longest ? length : longest));
        for (size_t k = 0; factor != 1 && k < width; k++)
            row[k] *= factor;
    }
}

/* out, zeros (m, n), plus a (m, depth) times b (depth, n), added up in the order of depth. */
WIDE void atoll_product(const double *a, const double *b, size_t m, size_t depth, size_t n, double *restrict out)
{
    for (size_t i = 0; i < m; i++)
        for (size_t c = 0; c < depth; c++) {
            const double factor = a[i * depth + c];
            for (size_t j = 0; j < n; j++)
                out[i * n + j] += factor * b[c * n + j];
        }
}

/* Inner products of all pairs of rows, row by row of the upper triangle (triangle.py). Each product is exact in double; value k of a row goes to
   lane k % LANES, lanes are added up in order, then folded in halves. scratch: n * TILE doubles, and LANES for each pair. */
WIDE void atoll_triangle(const float *rows, size_t stride, size_t n, size_t width, double *restrict scratch, double *restrict out)
{
    double *lanes = scratch + n * TILE;
    const size_t pairs = n * (n + 1) / 2;
    memset(lanes, 0, 8 * pairs * LANES);
    for (size_t start = 0; start < width; start += TILE) {
        const size_t length = width - start < TILE ? width - start : TILE, whole = (length + LANES - 1) / LANES * LANES;
        for (size_t i = 0; i < n; i++) {
            const float *row = rows + i * stride + start;
            double *wide = scratch + i * TILE;
            for (size_t k = 0; k < length; k++)
                wide[k] = row[k];
            for (size_t k = length; k < whole; k++)
                wide[k] = 0;
        }
        double *sums = lanes;
        for (size_t i = 0; i < n; i++)
            for (size_t j = i; j < n; j++, sums += LANES) {
                const double *a = scratch + i * TILE, *b = scratch + j * TILE;
                double sum[LANES];
                memcpy(sum, sums, sizeof sum);
                for (size_t k = 0; k < whole; k += LANES)
                    for (size_t l = 0; l < LANES; l++)
                        sum[l] += a[k + l] * b[k + l];
                memcpy(sums, sum, sizeof sum);
            }
    }
    for (size_t pair = 0; pair < pairs; pair++) {
        double *sum = lanes + pair * LANES;
        for (size_t half = LANES / 2; half; half /= 2)
            for (size_t l = 0; l < half; l++)
                sum[l] += sum[half + l];
        out[pair] = sum[0];
    }
}
