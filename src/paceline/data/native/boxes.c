/* Random crops as torchvision's RandomResizedCrop draws them, as a pure function of a sample's number. In C because
 * interpreted code would hold the lock that the training loop needs, and would cost more than reading a record. */
#include <math.h>

#include "codec.h"

/* splitmix64, as in load/order.py */
static uint64_t bits_of(int64_t id, uint64_t begin)
{
    uint64_t bits = (uint64_t)id * 0x9E3779B97F4A7C15u + begin;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

static double uniform(int64_t id, uint64_t begin)
{
    return (double)(bits_of(id, begin) >> 40) / (1 << 24);
}

static void centred(int32_t *box, double crop_width, double crop_height, int width, int height)
{
    box[2] = crop_width < 1 ? 1 : (int32_t)crop_width;
    box[3] = crop_height < 1 ? 1 : (int32_t)crop_height;
    box[0] = (width - box[2]) / 2;
    box[1] = (height - box[3]) / 2;
}

static int drawn(int32_t *box, int64_t id, int width, int height, const BoxLimits *limits, const uint64_t *begins)
{
    double area = (double)width * height * (limits->least_area + uniform(id, begins[0]) * (limits->most_area - limits->least_area));
    double low = log(limits->least_ratio), high = log(limits->most_ratio);
    double ratio = exp(low + uniform(id, begins[1]) * (high - low));
    double crop_width = rint(sqrt(area * ratio)), crop_height = rint(sqrt(area / ratio));
    if (!(crop_width > 0 && crop_width <= width && crop_height > 0 && crop_height <= height))
        return 0;
    box[2] = (int32_t)crop_width;
    box[3] = (int32_t)crop_height;
    box[0] = (int32_t)(uniform(id, begins[2]) * (width - box[2] + 1));
    box[1] = (int32_t)(uniform(id, begins[3]) * (height - box[3] + 1));
    return 1;
}

void random_boxes(const int32_t (*sizes)[2], const int64_t *ids, int64_t num, const BoxLimits *limits,
                  const uint64_t (*begins)[4], int attempts, int32_t (*boxes)[5])
{
    for (int64_t i = 0; i < num; i++) {
        int width = sizes[i][0], height = sizes[i][1], attempt = 0;
        while (attempt < attempts && !drawn(boxes[i], ids[i], width, height, limits, begins[attempt]))
            attempt++;
        if (attempt == attempts) { /* the largest part in the middle whose aspect ratio is allowed */
            double widest = rint(height * limits->most_ratio), highest = rint(width / limits->least_ratio);
            centred(boxes[i], width > height * limits->most_ratio ? widest : width,
                    width < height * limits->least_ratio ? highest : height, width, height);
        }
        boxes[i][4] = limits->mirror && (bits_of(ids[i], limits->mirror_begin) >> 63 == 0) == (limits->mirror == 1);
    }
}
