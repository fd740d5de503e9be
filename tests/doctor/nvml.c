/* Two GPUs and a lost one, with the functions and structures of nvml.h that the quick check uses. */
#include <stdio.h>
#include <string.h>
typedef void *gpu;
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
struct fabric { unsigned char cluster[16]; unsigned status, clique; unsigned char state; };
struct field { unsigned id, scope; long long time, latency; unsigned type, result; union { unsigned u; double d; } value; };

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, gpu *d) { *d = (gpu)(0x700000000000L + i); return i == 2 ? 15 : 0; }
int nvmlDeviceGetName(gpu d, char *text, unsigned n) { snprintf(text, n, "NVIDIA H100"); return 0; }
int nvmlDeviceGetUUID(gpu d, char *text, unsigned n) { snprintf(text, n, "GPU-%lx", (long)d); return 0; }
int nvmlDeviceGetPciInfo_v3(gpu d, struct pci *p) { memset(p, 0, sizeof *p); p->bus = 0x9a - ((long)d & 255); return 0; }
int nvmlDeviceGetRemappedRows(gpu d, unsigned *a, unsigned *b, unsigned *pending, unsigned *failed)
{ *a = *b = *failed = 0; *pending = 1; return 0; }
int nvmlDeviceGetTotalEccErrors(gpu d, int type, int since, unsigned long long *n)
{ *n = 5000000000ULL; return type == 1 && since == 0 ? 0 : 2; }
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu d, unsigned long long *bits) { *bits = 0x48; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(gpu d, unsigned *n) { *n = 8; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(gpu d, unsigned *n) { *n = 16; return 0; }
int nvmlDeviceGetGpuFabricInfo(gpu d, struct fabric *f) { memset(f, 0, sizeof *f); f->state = 2; return 0; }
int nvmlDeviceGetFieldValues(gpu d, int n, struct field *f) { f->result = 0; f->value.u = 4; return f->id == 230 ? 0 : 2; }
int nvmlDeviceGetNvLinkState(gpu d, unsigned link, unsigned *active) { *active = link != 3; return link < 18 ? 0 : 3; }
int nvmlDeviceGetMigMode(gpu d, unsigned *now, unsigned *pending) { *now = *pending = 0; return 0; }
