/* The arithmetic of int8, int8_dither and fp32 (see kernels.py, blocks.py, floats.py), and of stat2 and the sparse codecs (levels.py, sparse.py), a block
   of 256 values at a time (or a tile of 4096), so that a value is read from memory once.

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

/* Codes that are off by less than one, and right on average: what is added before a value is rounded follows from its bits, its place,
   and the sum of all bits of the block (kernels.py, `Chance`). */
INLINE void dithered(const float *restrict x, size_t n, float factor, int8_t *restrict codes)
{
    const float half = 12582912.0f;
    uint32_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        sum += bits;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits ^= sum + (uint32_t)i * 0x9e3779b9u;
        bits = (bits ^ bits >> 16) * 0x7feb352du;
        bits = (bits ^ bits >> 15) * 0x846ca68bu;
        const float offset = ((float)(int32_t)(bits >> 16) - 32767.5f) * 1.52587890625e-05f;
        float code = ((x[i] * factor + offset) + half) - half;
        code = code > 127.0f ? 127.0f : code;
        codes[i] = (int8_t)(int32_t)(code < -127.0f ? -127.0f : code);
    }
}

INLINE float encode_block(const float *restrict x, size_t n, float share, float divisor, int dither, int8_t *restrict codes)
{
    float scale = absmax(x, n) * share;
    scale = scale < TINY ? TINY : scale;
    const float factor = 1.0f / scale, half = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest even integer */
    if (dither)
        dithered(x, n, factor, codes);
    else
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

/* ``dither``: of int8_dither; else of int8. */
WIDE int atoll_blocks_encode(const float *x, size_t n, float share, float limit, int dither, void *wire)
{
    float *scales = wire;
    int8_t *codes = codes_of(wire, n);
    size_t whole = n / BLOCK, rest = n % BLOCK;
    for (size_t b = 0; b < whole; b++, x += BLOCK, codes += BLOCK) {
        for (size_t i = 0; i < BLOCK; i += 16)
            __builtin_prefetch(x + AHEAD + i);
        scales[b] = encode_block(x, BLOCK, share, 1.0f, dither, codes);
    }
    if (rest)
        scales[whole] = encode_block(x, rest, share, 1.0f, dither, codes);
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
int atoll_blocks_encode_chunks(const float *x, size_t n, size_t chunks, float share, float limit, int dither, char *wire)
{
    int ok = 1;
    for (; chunks; chunks--, x += n, wire += 4 * blocks_of(n) + (n + 3) / 4 * 4)
        ok &= atoll_blocks_encode(x, n, share, limit, dither, wire);
    return ok;
}

void atoll_decode_chunks(char *wire, size_t n, size_t chunks, float *out, int cold)
{
    for (; chunks; chunks--, out += n, wire += 4 * blocks_of(n) + (n + 3) / 4 * 4)
        atoll_decode(wire, n, out, cold);
}

/* Encodes (sum of weights[k] * decoded k) / divisor, in this order. */
WIDE int atoll_blocks_mean(void *const *wires, const float *weights, size_t count, size_t n, float share, float divisor, float limit, int dither,
                           void *out)
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
        scales[b] = length < BLOCK ? encode_block(sum, length, share, divisor, dither, codes)
                                   : encode_block(sum, BLOCK, share, divisor, dither, codes);
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

/* stat2 and the sparse codecs: records of two levels, then (sparse) indices, then codes of two bits: sign, and which level. */

#define FINE 9.5367431640625e-07f /* 2^-20: magnitudes are added up as integers, in units of this share of the largest */
#define TILE 4096
#define MOST 512 /* values of a tile that are kept */

INLINE size_t packed(size_t n) { return (n + 3) / 4; }
INLINE size_t indices(size_t kept) { return (3 * kept + 1) / 2; }
INLINE size_t padded(size_t n) { return (n + 3) / 4 * 4; }
INLINE size_t kept_of(size_t n, size_t keep) { return (keep * n + TILE - 1) / TILE; }
INLINE size_t record_of(size_t kept) { return padded(8 + indices(kept) + packed(kept)); }

/* Levels to ``levels``, codes of n <= MOST values to ``out``. */
INLINE void encode_levels(const float *restrict x, size_t n, float *restrict levels, uint8_t *restrict out)
{
    const float most = absmax(x, n), unit = (most < TINY ? TINY : most) * FINE, factor = 1.0f / unit, half = 12582912.0f;
    const size_t bytes = packed(n);
    uint32_t bits;
    memcpy(&bits, &most, 4);
    if (bits >= INFINITE) {
        const uint32_t none = 0x7fc00000u;
        memcpy(levels, &none, 4);
        memcpy(levels + 1, &none, 4);
        memset(out, 0, bytes);
        return;
    }
    int32_t fine[MOST], total = 0, above = 0, count = 0;
    uint8_t codes[MOST + 4];
    for (size_t i = 0; i < n; i++) {
        const float value = x[i] < 0.0f ? -x[i] : x[i];
        fine[i] = (int32_t)((value * factor + half) - half);
        total += fine[i];
    }
    for (size_t i = 0; i < n; i++) {
        const int32_t high = fine[i] * (int32_t)n > total;
        above += high ? fine[i] : 0;
        count += high;
        codes[i] = (uint8_t)(2 * high + (x[i] < 0.0f));
    }
    levels[0] = (float)(total - above) / (float)((int32_t)n - count) * unit;
    levels[1] = count ? (float)above / (float)count * unit : levels[0];
    for (size_t i = n; i < 4 * bytes; i++)
        codes[i] = 0;
    for (size_t i = 0; i < bytes; i++)
        out[i] = (uint8_t)(codes[i] | codes[i + bytes] << 2 | codes[i + 2 * bytes] << 4 | codes[i + 3 * bytes] << 6);
}

/* The values of codes times the weight. */
INLINE void decode_levels(const float *restrict levels, const uint8_t *restrict codes, size_t n, float weight, float *restrict out)
{
    const float low = levels[0] * weight, high = levels[1] * weight;
    uint32_t lows, highs;
    memcpy(&lows, &low, 4);
    memcpy(&highs, &high, 4);
    const size_t bytes = packed(n);
    for (size_t part = 0; part < 4; part++)
        for (size_t i = 0; i < bytes; i++) {
            const uint32_t code = codes[i] >> 2 * part;
            const uint32_t bits = (code & 2 ? highs : lows) ^ (code & 1) << 31;
            memcpy(out + part * bytes + i, &bits, 4); /* out has room for 4 * bytes */
        }
}

INLINE int level(float x) { return x >= 0.0f && x <= 3.4028234663852886e38f; }
INLINE int sound(const float *levels) { return level(levels[0]) && level(levels[1]); }

#define LEVELS_RECORD (8 + BLOCK / 4)

/* 1 when all levels are numbers, not negative and finite. */
static int levels_sound(const char *wire, size_t n)
{
    int ok = 1;
    for (size_t at = 0; at < n; at += BLOCK, wire += LEVELS_RECORD)
        ok &= sound((const float *)wire);
    return ok;
}

WIDE static int levels_encode(const float *x, size_t n, char *wire)
{
    int ok = 1;
    for (; n >= BLOCK; n -= BLOCK, x += BLOCK, wire += LEVELS_RECORD) {
        encode_levels(x, BLOCK, (float *)wire, (uint8_t *)wire + 8);
        ok &= sound((float *)wire);
    }
    if (n) {
        memset(wire, 0, padded(8 + packed(n))); /* padding is hashed like the rest */
        encode_levels(x, n, (float *)wire, (uint8_t *)wire + 8);
        ok &= sound((float *)wire);
    }
    return ok;
}

/* out += weight * decoded; with ``first``: out = weight * decoded. */
WIDE static void levels_add(const char *wire, size_t n, float weight, int first, float *restrict out)
{
    float values[BLOCK + 4];
    for (size_t length; n; n -= length, out += length, wire += LEVELS_RECORD) {
        length = n < BLOCK ? n : BLOCK;
        if (length == BLOCK)
            decode_levels((const float *)wire, (const uint8_t *)wire + 8, BLOCK, weight, values);
        else
            decode_levels((const float *)wire, (const uint8_t *)wire + 8, length, weight, values);
        if (first)
            memcpy(out, values, 4 * length);
        else
            for (size_t i = 0; i < length; i++)
                out[i] += values[i];
    }
}

/* The indices of the kept largest magnitudes, ascending; of equal ones the first. */
INLINE void largest(const float *restrict x, size_t n, size_t kept, uint16_t *restrict found)
{
    int32_t bits[TILE], bound = 0; /* the kept-th largest magnitude's bits, from the highest down */
    for (size_t i = 0; i < n; i++) {
        memcpy(bits + i, x + i, 4);
        bits[i] &= 0x7fffffff;
    }
    for (int bit = 30; bit >= 0; bit--) {
        const int32_t trial = bound | (int32_t)1 << bit;
        int32_t count = 0;
        for (size_t i = 0; i < n; i++)
            count += bits[i] >= trial;
        if ((size_t)count >= kept)
            bound = trial;
        if ((size_t)count == kept)
            break;
    }
    size_t equal = kept, at = 0; /* how many of those on the bound are taken */
    for (size_t i = 0; i < n; i++)
        equal -= bits[i] > bound;
    for (size_t i = 0; at < kept; i += 32) {
        const size_t stop = n - i < 32 ? n : i + 32;
        int any = 0;
        for (size_t j = i; j < stop; j++)
            any |= bits[j] >= bound;
        for (size_t j = i; any && j < stop && at < kept; j++)
            if (bits[j] > bound || (bits[j] == bound && equal && equal--))
                found[at++] = (uint16_t)j;
    }
}

WIDE static int sparse_encode(const float *x, size_t n, size_t keep, char *wire)
{
    uint16_t found[MOST + 1];
    float values[MOST];
    int ok = 1;
    for (size_t length; n; n -= length, x += length) {
        length = n < TILE ? n : TILE;
        const size_t kept = kept_of(length, keep);
        uint8_t *bytes = (uint8_t *)wire + 8;
        memset(wire, 0, record_of(kept));
        if (length == TILE)
            largest(x, TILE, kept, found);
        else
            largest(x, length, kept, found);
        found[kept] = 0;
        for (size_t i = 0; i < kept; i++)
            values[i] = x[found[i]];
        encode_levels(values, kept, (float *)wire, bytes + indices(kept));
        for (size_t i = 0; i < kept; i += 2, bytes += 3) {
            bytes[0] = (uint8_t)found[i];
            bytes[1] = (uint8_t)(found[i] >> 8 | found[i + 1] << 4);
            if (i + 1 < kept)
                bytes[2] = (uint8_t)(found[i + 1] >> 4);
        }
        ok &= sound((float *)wire);
        wire += record_of(kept);
    }
    return ok;
}

INLINE size_t index_at(const uint8_t *bytes, size_t i)
{
    const uint8_t *pair = bytes + i / 2 * 3;
    return i % 2 ? (size_t)pair[1] >> 4 | (size_t)pair[2] << 4 : (size_t)pair[0] | ((size_t)pair[1] & 15) << 8;
}

/* 1 when all levels are sound, and the indices of each tile ascend and lie in it. */
static int sparse_sound(const char *wire, size_t n, size_t keep)
{
    int ok = 1;
    for (size_t length; n; n -= length) {
        length = n < TILE ? n : TILE;
        const size_t kept = kept_of(length, keep);
        size_t next = 0; /* the smallest index that may come */
        for (size_t i = 0; i < kept; i++) {
            const size_t index = index_at((const uint8_t *)wire + 8, i);
            ok &= index >= next && index < length;
            next = index + 1;
        }
        ok &= sound((const float *)wire);
        wire += record_of(kept);
    }
    return ok;
}

/* As levels_add. An index outside the tile is passed over. */
WIDE static void sparse_add(const char *wire, size_t n, size_t keep, float weight, int first, float *restrict out)
{
    float values[MOST + 4];
    if (first)
        memset(out, 0, 4 * n);
    for (size_t length; n; n -= length, out += length) {
        length = n < TILE ? n : TILE;
        const size_t kept = kept_of(length, keep);
        const uint8_t *bytes = (const uint8_t *)wire + 8;
        decode_levels((const float *)wire, bytes + indices(kept), kept, weight, values);
        for (size_t i = 0; i < kept; i++) {
            const size_t index = index_at(bytes, i);
            if (index < length)
                out[index] = first ? values[i] : out[index] + values[i];
        }
        wire += record_of(kept);
    }
}

/* ``keep`` values of a whole tile; 0: stat2. */
int atoll_records_encode(const float *x, size_t n, size_t keep, char *wire)
{
    return keep ? sparse_encode(x, n, keep, wire) : levels_encode(x, n, wire);
}

void atoll_records_add(const char *wire, size_t n, size_t keep, float weight, int first, float *out)
{
    if (keep)
        sparse_add(wire, n, keep, weight, first, out);
    else
        levels_add(wire, n, weight, first, out);
}

int atoll_records_sound(const char *wire, size_t n, size_t keep)
{
    return keep ? sparse_sound(wire, n, keep) : levels_sound(wire, n);
}
