/* Random crops with the distribution of torchvision's RandomResizedCrop, as a pure function of a sample's id. In C,
 * because Python would hold the GIL, which the training loop needs, and take longer than decoding a record. */
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

static void centered(int32_t *box, double crop_width, double crop_height, int width, int height)
{
    box[2] = crop_width < 1 ? 1 : (int32_t)crop_width;
    box[3] = crop_height < 1 ? 1 : (int32_t)crop_height;
    box[0] = (width - box[2]) / 2;
    box[1] = (height - box[3]) / 2;
}

static int draw(int32_t *box, int64_t id, int width, int height, const BoxLimits *limits, const uint64_t *begins)
{
    double area = (double)width * height * (limits->min_area + uniform(id, begins[0]) * (limits->max_area - limits->min_area));
    double low = log(limits->min_ratio), high = log(limits->max_ratio);
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
        while (attempt < attempts && !draw(boxes[i], ids[i], width, height, limits, begins[attempt]))
            attempt++;
        if (attempt == attempts) { /* the largest center crop with an allowed aspect ratio */
            double widest = rint(height * limits->max_ratio), highest = rint(width / limits->min_ratio);
            centered(boxes[i], width > height * limits->max_ratio ? widest : width,
                    width < height * limits->min_ratio ? highest : height, width, height);
        }
        boxes[i][4] = limits->mirror && (bits_of(ids[i], limits->mirror_begin) >> 63 == 0) == (limits->mirror == 1);
    }
}
