/* CRC-32C of a record in three lanes: a core computes three as fast as one. Reading the whole record also brings it
 * into the cache for decoding. */
#include "codec.h"

static uint32_t table[8][256];

__attribute__((constructor)) static void make_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
        table[0][byte] = crc;
    }
    for (int slice = 1; slice < 8; slice++)
        for (int byte = 0; byte < 256; byte++)
            table[slice][byte] = table[slice - 1][byte] >> 8 ^ table[0][table[slice - 1][byte] & 255];
}

ALWAYS_INLINE uint64_t word(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

ALWAYS_INLINE uint32_t add_word_portable(uint32_t crc, uint64_t value)
{
    value ^= crc;
    return table[7][value & 255] ^ table[6][value >> 8 & 255] ^ table[5][value >> 16 & 255] ^
           table[4][value >> 24 & 255] ^ table[3][value >> 32 & 255] ^ table[2][value >> 40 & 255] ^
           table[1][value >> 48 & 255] ^ table[0][value >> 56];
}

ALWAYS_INLINE uint32_t add_byte_portable(uint32_t crc, uint8_t value)
{
    return crc >> 8 ^ table[0][(crc ^ value) & 255];
}

/* Lanes of `lane` bytes each, the third with the rest. The sums of the second and third are added to the first one. */
#define CHECKSUM(add_word, add_byte)                          \
    size_t lane = length / 24 * 8;                            \
    uint32_t a = ~0u, b = ~0u, c = ~0u;                       \
    for (size_t at = 0; at < lane; at += 8) {                 \
        a = (uint32_t)add_word(a, word(bytes + at));          \
        b = (uint32_t)add_word(b, word(bytes + lane + at));   \
        c = (uint32_t)add_word(c, word(bytes + 2 * lane + at)); \
    }                                                         \
    for (size_t at = 3 * lane; at < length; at++)             \
        c = (uint32_t)add_byte(c, bytes[at]);                 \
    return (uint32_t)add_word(a, (uint64_t)c << 32 | b);

static uint32_t checksum_portable(const uint8_t *bytes, size_t length)
{
    CHECKSUM(add_word_portable, add_byte_portable)
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
__attribute__((target("sse4.2"))) static uint32_t checksum_sse42(const uint8_t *bytes, size_t length)
{
    CHECKSUM(_mm_crc32_u64, _mm_crc32_u8)
}
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
static uint32_t checksum_arm(const uint8_t *bytes, size_t length)
{
    CHECKSUM(__crc32cd, __crc32cb)
}
#endif

uint32_t record_checksum(const uint8_t *record, size_t length, int portable)
{
    const uint8_t *bytes = record + CHECKSUM_FROM;
    length -= CHECKSUM_FROM;
#if defined(__x86_64__) && defined(__GNUC__)
    if (!portable && __builtin_cpu_supports("sse4.2"))
        return checksum_sse42(bytes, length);
#elif defined(__ARM_FEATURE_CRC32)
    if (!portable)
        return checksum_arm(bytes, length);
#endif
    (void)portable;
    return checksum_portable(bytes, length);
}
