/* A libnvidia-ml.so for tests: answers, lies, sleeps, blocks for ever, crashes, tells Xids or lacks functions, as FAKE_NVML says.
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

typedef struct {
    char legacy[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} Pci;
typedef struct {
    Device device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} Event;
typedef struct {
    unsigned int field, scope;
    long long at_us, latency_us;
    int type, error;
    union {
        unsigned int number;
        double padding;
    } value;
} Field;

enum { OK = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15, UNKNOWN = 999 };
enum { XID_CRITICAL_ERROR = 8, EVENT_SETS_MAX = 128, RECOVERY_ACTION = 230 };

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

/* The first GPU falls off the bus a while after it was found. */
static int fell_off(void) {
    static int asked;
    return (is("xid-lost") || is("xid-all-lost")) && ++asked > 3;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    told("nvmlDeviceGetCount_v2");
    if (is("xid-all-lost") && fell_off()) return GPU_IS_LOST;
    *count = is("lie") ? 4000000000u : 2;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device *device) {
    told("nvmlDeviceGetHandleByIndex_v2");
    if (index == 0 && (is("lost") || (is("xid-lost") && fell_off()))) return GPU_IS_LOST;
    *device = (Device)(unsigned long)(index + 1);
    return OK;
}
int nvmlDeviceGetUUID(Device device, char *uuid, unsigned int length) {
    told("nvmlDeviceGetUUID");
    snprintf(uuid, length, is("lie") ? "GPU-\033[31m%lu\n" : "GPU-%lu", (unsigned long)device);
    return OK;
}

int nvmlDeviceGetPciInfo_v3(Device device, Pci *pci) {
    told("nvmlDeviceGetPciInfo_v3");
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, is("lie") ? "\n\033" : "00000000:%02lX:00.0", 67 + (unsigned long)device);
    return OK;
}

#ifndef WITHOUT_UTILIZATION
int nvmlDeviceGetUtilizationRates(Device device, Utilization *used) {
    static int calls;
    told("nvmlDeviceGetUtilizationRates");
    /* cut into parts (MIG): all cards, or the first */
    if (is("mig") || (is("mig-first") && device == (Device)1)) return NOT_SUPPORTED;
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
    *milliwatts = is("lie") ? 4294967295u : is("no-watts") ? 0 : 142000;
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

#ifndef WITHOUT_EVENTS
/* Each event set has one device, whose number it is. */
static Device devices[EVENT_SETS_MAX];
static int waits[EVENT_SETS_MAX];

int nvmlEventSetCreate(void **set) {
    static int sets;
    told("nvmlEventSetCreate");
    if (is("xid-crowded") || sets + 1 >= EVENT_SETS_MAX) return NOT_SUPPORTED;
    *set = (void *)(unsigned long)__atomic_add_fetch(&sets, 1, __ATOMIC_SEQ_CST);
    return OK;
}
int nvmlEventSetFree(void *set) { return (void)set, OK; }
int nvmlDeviceRegisterEvents(Device device, unsigned long long types, void *set) {
    told("nvmlDeviceRegisterEvents");
    if (is("xid-unsupported") || types != XID_CRITICAL_ERROR) return NOT_SUPPORTED;
    if (is("xid-block-register")) for (;;) pause();
    devices[(unsigned long)set] = device;
    return OK;
}
int nvmlEventSetWait_v2(void *set, Event *event, unsigned int timeout_ms) {
    unsigned long number = (unsigned long)set;
    int first = !waits[number]++;
    memset(event, 0, sizeof *event);
    event->device = devices[number];
    event->type = XID_CRITICAL_ERROR;
    if (!is("xid-lie")) told("nvmlEventSetWait_v2");
    if (is("xid-fails") && devices[number] == (Device)1) {
        static int failures;
        if (!failures++) return UNKNOWN;
    }
    /* the second GPU's wait never returns */
    if (is("xid-block") && devices[number] == (Device)2) for (;;) pause();
    if (is("xid-lie")) {
        /* at once and for ever: devices that nobody has, codes that are none, events of other kinds */
        static const unsigned long long codes[] = {0, 999, 100000, 4294967296ull, 18446744073709551615ull, 31, 79};
        event->device = (Device)0xdead;
        event->data = codes[waits[number] % 7];
        if (event->data == 79) event->type = 1;
        return OK;
    }
    if (first && devices[number] == (Device)1) {
        event->data = is("xid-154") ? 154 : 79;
        if (is("xid") || is("xid-154") || is("xid-block") || is("xid-fails") || is("mig") || is("mig-first")) return OK;
        if (is("xid-lost") || is("xid-all-lost")) return usleep(1500000), OK;
    }
    usleep(timeout_ms * 1000);
    return TIMEOUT;
}
int nvmlDeviceGetFieldValues(Device device, int count, Field *fields) {
    (void)device;
    for (int i = 0; i < count; i++) {
        fields[i].error = fields[i].field == RECOVERY_ACTION ? OK : NOT_SUPPORTED;
        fields[i].type = 1;
        fields[i].value.number = 2;
    }
    return OK;
}
#endif

/* Expensive: takes the driver's locks. Nobody may call these. */
int nvmlDeviceGetComputeRunningProcesses_v3(void) { return told("PROCESS LIST"), OK; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void) { return told("PROCESS LIST"), OK; }
int nvmlDeviceGetProcessUtilization(void) { return told("PROCESS LIST"), OK; }
