// A libcuda.so.1 for machines without a device: the functions that kernels/cuda/driver.py calls, with a driver's rules
// for contexts and captures. A module is the shared library whose path is the binary; launching runs it at once.
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500, LAUNCH_FAILED = 719 };
enum { NOT_SUPPORTED = 801 };
enum { MODE_GLOBAL = 0, MODE_RELAXED = 2 };

static char primary_contexts[4];  // only their addresses count
static __thread void* current_context;
static __thread int capture_mode = MODE_GLOBAL;
static int driver_version = 13000;
static uint64_t last_stream;
static unsigned last_block[3];

EXPORT int cuInit(unsigned flags) { return flags; }
EXPORT int cuDriverGetVersion(int* version) { return *version = driver_version, SUCCESS; }
EXPORT int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < 4 ? SUCCESS : INVALID_VALUE; }
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = primary_contexts + device;
  return SUCCESS;
}
EXPORT int cuCtxGetCurrent(void** context) { return *context = current_context, SUCCESS; }
EXPORT int cuCtxSetCurrent(void* context) { return current_context = context, SUCCESS; }
EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int previous = capture_mode;
  capture_mode = *mode;
  *mode = previous;
  return SUCCESS;
}
EXPORT int cuModuleLoadData(void** module, const void* image) {
  if (current_context == 0) return INVALID_CONTEXT;
  if (capture_mode != MODE_RELAXED) return NOT_SUPPORTED;
  *module = dlopen(image, RTLD_NOW | RTLD_LOCAL);
  return *module ? SUCCESS : INVALID_VALUE;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  // With lazy loading, the kernel is loaded only here.
  if (current_context == 0) return INVALID_CONTEXT;
  if (capture_mode != MODE_RELAXED) return NOT_SUPPORTED;
  *function = dlsym(module, name);
  return *function ? SUCCESS : NOT_FOUND;
}
EXPORT int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                          unsigned threads_z, unsigned shared_bytes, void* stream, void** parameters, void** extra) {
  if (current_context == 0) return INVALID_CONTEXT;
  if (x == 0 || y != 1 || z != 1 || threads_y != 1 || threads_z != 1) return INVALID_VALUE;
  if (shared_bytes != 0 || extra != 0) return INVALID_VALUE;
  last_stream = (uint64_t)(uintptr_t)stream;
  last_block[0] = threads_x;
  const char* (*run)(void**, unsigned);
  memcpy(&run, &function, sizeof run);
  return run(parameters, x) == 0 ? SUCCESS : LAUNCH_FAILED;
}

EXPORT void fake_set_version(int version) { driver_version = version; }
EXPORT uint64_t fake_last_stream(void) { return last_stream; }
EXPORT unsigned fake_last_num_threads(void) { return last_block[0]; }
EXPORT void* fake_current_context(void) { return current_context; }
EXPORT int fake_capture_mode(void) { return capture_mode; }

static int find(const char* name, void** function) {
  static const struct { const char* name; void* function; } table[] = {
      {"cuInit", cuInit},
      {"cuDriverGetVersion", cuDriverGetVersion},
      {"cuDeviceGet", cuDeviceGet},
      {"cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain},
      {"cuCtxGetCurrent", cuCtxGetCurrent},
      {"cuCtxSetCurrent", cuCtxSetCurrent},
      {"cuThreadExchangeStreamCaptureMode", cuThreadExchangeStreamCaptureMode},
      {"cuModuleLoadData", cuModuleLoadData},
      {"cuModuleGetFunction", cuModuleGetFunction},
      {"cuLaunchKernel", cuLaunchKernel},
  };
  *function = 0;
  for (size_t i = 0; i < sizeof table / sizeof *table; ++i) {
    if (strcmp(table[i].name, name) == 0) *function = table[i].function;
  }
  return *function ? SUCCESS : NOT_FOUND;
}
EXPORT int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return (void)version, (void)flags, find(name, function);
}
EXPORT int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  const int result = find(name, function);
  if (status) *status = result == SUCCESS ? 0 : 1;
  return result;
}
