/* The arithmetic of int8 and fp32 (see kernels.py, blocks.py, floats.py), a block of 256 values at a time, so that a value is read from
   memory once.

   Bits: every operation is rounded by itself, in the order of the torch kernels; built with -ffp-contract=off, without -ffast-math.
   A NaN or an infinity makes its block's scale non-finite; the codes of such a block mean nothing. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK 256
#define TINY 1e-30f
#define AHEAD (4 * BLOCK) /* values; the first of the two passes over a block is too short for the hardware to see a stream */

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
/* Chosen when the library is loaded. "arch=skylake-avx512" would mean that processor alone, and neither later ones nor AMD's. */
#if __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WIDE __attribute__((target_clones("avx2", "default")))
#endif
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

/* Copies a block to memory that nobody reads soon: past the caches, which would first fetch what is overwritten. */
INLINE void store(float *restrict out, const float *restrict block, size_t n)
{
#ifdef __SSE2__
    if (n == BLOCK && (uintptr_t)out % 16 == 0) {
        for (size_t i = 0; i < BLOCK; i += 4)
            _mm_stream_ps(out + i, _mm_loadu_ps(block + i));
        return;
    }
#endif
    memcpy(out, block, 4 * n);
}

INLINE void stored(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

INLINE float absmax(const float *restrict x, size_t n)
{
    uint32_t most = 0; /* magnitudes are ordered like their bits, and NaN is the largest of all */
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    float found;
    memcpy(&found, &most, 4);
    return found;
}

INLINE float encode_block(const float *restrict x, size_t n, float share, float divisor, int8_t *restrict codes)
{
    float scale = absmax(x, n) * share;
    scale = scale < TINY ? TINY : scale;
    const float factor = 1.0f / scale, half = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest even integer */
    for (size_t i = 0; i < n; i++)
        codes[i] = (int8_t)(int32_t)((x[i] * factor + half) - half);
    return scale / divisor;
}

/* A wire: a scale a started block, a code a value, padding to 4 bytes. */
INLINE size_t blocks_of(size_t n) { return (n + BLOCK - 1) / BLOCK; }
INLINE int8_t *codes_of(void *wire, size_t n) { return (int8_t *)wire + 4 * blocks_of(n); }

/* 1 when no scale exceeds the limit or is NaN. */
WIDE int atoll_within(const void *wire, size_t n, float limit)
{
    const float *scales = wire;
    int ok = 1;
    for (size_t b = 0; b < blocks_of(n); b++)
        ok &= scales[b] >= -limit && scales[b] <= limit;
    return ok;
}

INLINE int finish(void *wire, size_t n, float limit)
{
    for (size_t i = n; i % 4; i++)
        codes_of(wire, n)[i] = 0; /* hashed like the rest */
    return atoll_within(wire, n, limit);
}

WIDE int atoll_encode(const float *x, size_t n, float share, float limit, void *wire)
{
    float *scales = wire;
    int8_t *codes = codes_of(wire, n);
    size_t whole = n / BLOCK, rest = n % BLOCK;
    for (size_t b = 0; b < whole; b++, x += BLOCK, codes += BLOCK) {
        for (size_t i = 0; i < BLOCK; i += 16)
            __builtin_prefetch(x + AHEAD + i);
        scales[b] = encode_block(x, BLOCK, share, 1.0f, codes);
    }
    if (rest)
        scales[whole] = encode_block(x, rest, share, 1.0f, codes);
    return finish(wire, n, limit);
}

/* ``cold``: nobody reads ``out`` soon. */
WIDE void atoll_decode(void *wire, size_t n, float *restrict out, int cold)
{
    const float *restrict scales = wire;
    const int8_t *restrict codes = codes_of(wire, n);
    float block[BLOCK];
    for (size_t b = 0; n; b++, codes += BLOCK, out += BLOCK) {
        const size_t length = n < BLOCK ? n : BLOCK;
        float *restrict values = cold ? block : out;
        if (length == BLOCK)
            for (size_t i = 0; i < BLOCK; i++)
                values[i] = (float)codes[i] * scales[b];
        else
            for (size_t i = 0; i < length; i++)
                values[i] = (float)codes[i] * scales[b];
        if (cold)
            store(out, block, length);
        n -= length;
    }
    stored();
}

/* Chunks of n values each, whose wires lie one after another: one call, so that the caller waits for its interpreter's lock once. */
int atoll_encode_chunks(const float *x, size_t n, size_t chunks, float share, float limit, char *wire)
{
    int ok = 1;
    for (; chunks; chunks--, x += n, wire += 4 * blocks_of(n) + (n + 3) / 4 * 4)
        ok &= atoll_encode(x, n, share, limit, wire);
    return ok;
}

void atoll_decode_chunks(char *wire, size_t n, size_t chunks, float *out, int cold)
{
    for (; chunks; chunks--, out += n, wire += 4 * blocks_of(n) + (n + 3) / 4 * 4)
        atoll_decode(wire, n, out, cold);
}

/* Encodes (sum of weights[k] * decoded k) / divisor, in this order. */
WIDE int atoll_mean(void *const *wires, const float *weights, size_t count, size_t n, float share, float divisor, float limit, void *out)
{
    float sum[BLOCK], *scales = out;
    for (size_t b = 0, at = 0; at < n; b++, at += BLOCK) {
        const size_t length = n - at < BLOCK ? n - at : BLOCK;
        for (size_t k = 0; k < count; k++) {
            const float scale = ((const float *)wires[k])[b] * weights[k];
            const int8_t *restrict from = codes_of(wires[k], n) + at;
            if (length < BLOCK)
                for (size_t i = 0; i < length; i++)
                    sum[i] = k == 0 ? (float)from[i] * scale : sum[i] + (float)from[i] * scale;
            else if (k == 0) /* lengths known to the compiler */
                for (size_t i = 0; i < BLOCK; i++)
                    sum[i] = (float)from[i] * scale;
            else
                for (size_t i = 0; i < BLOCK; i++)
                    sum[i] += (float)from[i] * scale;
        }
        int8_t *codes = codes_of(out, n) + at;
        scales[b] = length < BLOCK ? encode_block(sum, length, share, divisor, codes) : encode_block(sum, BLOCK, share, divisor, codes);
    }
    return finish(out, n, limit);
}

#define INFINITE 0x7f800000u /* the magnitude's bits; NaN is above */

INLINE uint32_t magnitude(const float *x, size_t n)
{
    float most = absmax(x, n);
    uint32_t bits;
    memcpy(&bits, &most, 4);
    return bits;
}

/* 1 when all values are finite. */
WIDE int atoll_finite(const float *x, size_t n)
{
    return magnitude(x, n) < INFINITE;
}

/* Copies values to where nobody reads them soon; 1 when all are finite. */
WIDE int atoll_copy(const float *x, size_t n, float *out)
{
    int ok = 1;
    for (size_t length; n; n -= length, x += length, out += length) {
        length = n < BLOCK ? n : BLOCK;
        ok &= (length == BLOCK ? magnitude(x, BLOCK) : magnitude(x, length)) < INFINITE;
        store(out, x, length);
    }
    stored();
    return ok;
}

/* out = (sum of weights[k] * wires[k]) / divisor, in this order; 1 when all of it is finite. */
WIDE int atoll_float_mean(void *const *wires, const float *weights, size_t count, size_t n, float divisor, float *out)
{
    int ok = 1;
    for (size_t at = 0; at < n; at += BLOCK) {
        const size_t length = n - at < BLOCK ? n - at : BLOCK;
        float *restrict sum = out + at;
        for (size_t k = 0; k < count; k++) {
            const float *restrict x = (const float *)wires[k] + at;
            const float weight = weights[k];
            if (k == 0)
                for (size_t i = 0; i < length; i++)
                    sum[i] = x[i] * weight;
            else
                for (size_t i = 0; i < length; i++)
                    sum[i] += x[i] * weight;
        }
        for (size_t i = 0; i < length; i++)
            sum[i] /= divisor;
        ok &= magnitude(sum, length) < INFINITE;
    }
    return ok;
}
