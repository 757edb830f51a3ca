/* A libnvidia-ml.so for tests: answers, lies, sleeps, blocks for ever, crashes or lacks functions, as FAKE_NVML says.
 * Every call is written to the file FAKE_NVML_LOG, so that a test sees what was asked and how often. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *Device;
typedef struct {
    unsigned int gpu, memory;
} Utilization;

enum { OK = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, GPU_IS_LOST = 15 };

static int is(const char *mode) {
    const char *now = getenv("FAKE_NVML");
    return now && !strcmp(now, mode);
}

static void told(const char *name) {
    const char *path = getenv("FAKE_NVML_LOG");
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (file < 0) return;
    dprintf(file, "%s\n", name);
    close(file);
}

int nvmlInit_v2(void) {
    told("nvmlInit_v2");
    if (is("block-init")) for (;;) pause();
    if (is("no-driver")) return 9;
    return OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return error ? "fake error" : "ok"; }

int nvmlDeviceGetCount_v2(unsigned int *count) {
    told("nvmlDeviceGetCount_v2");
    *count = is("lie") ? 4000000000u : 2;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device *device) {
    told("nvmlDeviceGetHandleByIndex_v2");
    if (is("lost") && index == 0) return GPU_IS_LOST;
    *device = (Device)(unsigned long)(index + 1);
    return OK;
}
int nvmlDeviceGetUUID(Device device, char *uuid, unsigned int length) {
    told("nvmlDeviceGetUUID");
    snprintf(uuid, length, is("lie") ? "GPU-\033[31m%lu\n" : "GPU-%lu", (unsigned long)device);
    return OK;
}

#ifndef WITHOUT_UTILIZATION
int nvmlDeviceGetUtilizationRates(Device device, Utilization *used) {
    static int calls;
    told("nvmlDeviceGetUtilizationRates");
    calls++;
    if (is("block") && calls > 2) for (;;) pause();
    if (is("spin") && calls > 2) for (;;) {}
    if (is("crash") && calls > 2) *(volatile int *)8 = 1;
    if (is("sleep") && calls > 2) sleep(1000);
    if (is("chatter")) {
        printf("NVML: hello from the driver\n");
        fflush(stdout);
    }
    used->gpu = is("lie") && device == (Device)2 ? 255 : 97;
    used->memory = 2;
    return OK;
}
#endif

#ifndef WITHOUT_POWER
int nvmlDeviceGetPowerUsage(Device device, unsigned int *milliwatts) {
    (void)device;
    told("nvmlDeviceGetPowerUsage");
    if (is("not-supported")) return NOT_SUPPORTED;
    *milliwatts = is("lie") ? 4294967295u : 142000;
    return OK;
}
#endif
int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned int *milliwatts) {
    (void)device;
    told("nvmlDeviceGetEnforcedPowerLimit");
    *milliwatts = 600000;
    return OK;
}
int nvmlDeviceGetClockInfo(Device device, int type, unsigned int *megahertz) {
    (void)device, (void)type;
    told("nvmlDeviceGetClockInfo");
    *megahertz = is("lie") ? 4294967295u : 1980;
    return OK;
}

/* Expensive: takes the driver's locks. Nobody may call these. */
int nvmlDeviceGetComputeRunningProcesses_v3(void) { return told("PROCESS LIST"), OK; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void) { return told("PROCESS LIST"), OK; }
int nvmlDeviceGetProcessUtilization(void) { return told("PROCESS LIST"), OK; }
