/* Two GPUs and a lost one, with the functions and structures of nvml.h that the quick check uses. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef void *gpu;
typedef unsigned long long u64;
struct memory { unsigned version; u64 total, reserved, free, used; };
struct process { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; };
struct rates { unsigned gpu, memory; };
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
struct fabric { unsigned char cluster[16]; unsigned status, clique; unsigned char state; };
struct field { unsigned id, scope; long long time, latency; unsigned type, result; union { unsigned u; double d; } value; };

int nvmlInitWithFlags(unsigned flags) { return flags; }
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
int nvmlDeviceGetMemoryInfo_v2(gpu d, struct memory *m)
{ if (m->version != (sizeof *m | 2 << 24)) return 25; m->used = 3ULL << 30; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(gpu d, unsigned *n, struct process *p)
{ /* this process, and one of another container; a process may have started between two calls */
  unsigned room = *n; *n = 2; if (room < 2) return 7;
  p[0].pid = getppid(); p[0].memory = 1ULL << 30; p[1].pid = 4194399; p[1].memory = ~0ULL; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(gpu d, unsigned *n) { *n = (long)d & 1 ? 3 : 0; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(gpu d, unsigned i, gpu *slice)
{ *slice = (gpu)((long)d + 16 * (i + 1)); return i == 1 ? 6 : 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu *d) { *d = 0; return strcmp(uuid, "GPU-1a") ? 6 : 0; }
int nvmlDeviceGetUtilizationRates(gpu d, struct rates *r) { r->gpu = 97; r->memory = 3; return 0; }
