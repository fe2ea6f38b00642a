/* A stand-in for NVIDIA's library: two devices with known figures, the second of which does not tell its power. */
#include <stdio.h>
#include <string.h>

typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;

static char devices[2];
#define NUMBER(device) ((int)((char *)(device) - devices))

int nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    snprintf(name, length, "Stand-in %d", NUMBER(device));
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-0000-%d", NUMBER(device));
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization *rates) {
    rates->gpu = 90 + NUMBER(device);
    rates->memory = 10;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *info) {
    (void)device;
    info->total = 16ull << 30;
    info->used = 4ull << 30;
    info->free = 12ull << 30;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 250000;
    return NUMBER(device) ? 3 /* not supported */ : 0;
}
int nvmlDeviceGetTemperature(void *device, int kind, unsigned *celsius) { (void)device; (void)kind; *celsius = 61; return 0; }
int nvmlDeviceGetTemperatureV(void *device, void *request) { (void)device; ((int *)request)[2] = 61; return 0; }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *megahertz) { (void)device; (void)kind; *megahertz = 1410; return 0; }
const char *nvmlErrorString(int status) { (void)status; return "not supported"; }
