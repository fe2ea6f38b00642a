/* Damages records and JPEGs and reads them anew; built with the address and undefined-behavior sanitizers.
 * usage: fuzz ROUNDS FILE.jpg ... */
#include <stdio.h>
#include <stdlib.h>

#include "codec.h"

static uint64_t state = 1;

static uint32_t chance(uint32_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % below);
}

static void damage(uint8_t *bytes, size_t length, size_t header)
{
    for (uint32_t i = 0, num = 1 + chance(8); i < num; i++) {
        /* the header and the index behind it are where a wrong value leads furthest */
        size_t among = chance(3) == 0 ? header : chance(3) == 0 ? 16 * header : length;
        bytes[chance((uint32_t)(among < length ? among : length))] = (uint8_t)(chance(3) ? chance(256) : 255);
    }
}

static uint8_t *copied(const uint8_t *bytes, size_t length, size_t room)
{
    uint8_t *copy = calloc(1, length + room);
    memcpy(copy, bytes, length);
    return copy;
}

static long records(const uint8_t *record, size_t length, int width, int height, int rounds, Workspace *workspace)
{
    static uint8_t out[3 * 48 * 40];
    long refused = 0;
    for (int round = 0; round < rounds; round++) {
        size_t kept = chance(10) ? length : chance((uint32_t)length);
        uint8_t *bytes = copied(record, kept, OVERRUN);
        damage(bytes, kept + (kept == 0), sizeof(RecordHeader));
        if (kept >= sizeof(RecordHeader) && chance(2)) /* a length that fits gets further */
            memcpy(bytes + 4, &(uint32_t){(uint32_t)kept}, 4);
        int w = 1 + (int)chance((uint32_t)width), h = 1 + (int)chance((uint32_t)height);
        Crop crop = {(int)chance((uint32_t)(width - w + 1)), (int)chance((uint32_t)(height - h + 1)), w, h,
                     (int)chance(2), 1 + (int)chance(48), 1 + (int)chance(40), (int)chance(2), (int)chance(2)};
        Status status = crop_portable(workspace, bytes, kept, &crop, out);
#ifdef HAVE_AVX2_PATH
        if (__builtin_cpu_supports("avx2"))
            status = crop_avx2(workspace, bytes, kept, &crop, out);
#endif
        refused += status != OK;
        Coefficients image = {0};
        if (record_unpack(bytes, kept, &image) == OK) {
            size_t capacity = jpeg_bound(&image), written;
            uint8_t *jpeg = malloc(capacity);
            jpeg_write(&image, jpeg, capacity, &written);
            free(jpeg);
        }
        coefficients_free(&image);
        static float thumbnail[THUMBNAIL * THUMBNAIL];
        record_thumbnail(bytes, kept, thumbnail);
        free(bytes);
    }
    return refused;
}

static long jpegs(const uint8_t *jpeg, size_t length, int rounds)
{
    long refused = 0;
    for (int round = 0; round < rounds; round++) {
        size_t kept = chance(4) ? length : chance((uint32_t)length);
        uint8_t *bytes = copied(jpeg, kept, 1);
        damage(bytes, kept + (kept == 0), 600);
        uint8_t *exact = malloc(kept + (kept == 0)); /* no spare byte behind it */
        memcpy(exact, bytes, kept);
        Coefficients image = {0};
        Status status = jpeg_read(&image, exact, kept);
        if (!status) {
            size_t capacity = record_bound(&image), written;
            uint8_t *record = malloc(capacity);
            record_pack(&image, record, capacity, &written);
            free(record);
        }
        refused += status != OK;
        coefficients_free(&image);
        free(exact);
        free(bytes);
    }
    return refused;
}

int main(int argc, char **argv)
{
    int rounds = atoi(argv[1]);
    long bad_records = 0, bad_jpegs = 0;
    Workspace *workspace = calloc(1, sizeof *workspace);
    for (int i = 2; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        static uint8_t jpeg[1 << 22];
        size_t length = fread(jpeg, 1, sizeof jpeg, file), packed;
        fclose(file);
        Coefficients image = {0};
        if (jpeg_read(&image, jpeg, length)) {
            fprintf(stderr, "%s cannot be read\n", argv[i]);
            return 1;
        }
        size_t capacity = record_bound(&image);
        uint8_t *record = malloc(capacity);
        record_pack(&image, record, capacity, &packed);
        bad_records += records(record, packed, image.width, image.height, rounds, workspace);
        bad_jpegs += jpegs(jpeg, length, rounds);
        free(record);
        coefficients_free(&image);
    }
    workspace_free(workspace);
    printf("%ld %ld\n", bad_records, bad_jpegs);
    return 0;
}
