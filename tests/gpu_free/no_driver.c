/* An H100 that is not there, for torch's CUDA build: functions of its libraries that would ask a driver. */
#include <driver_types.h>

static struct cudaDeviceProp h100 = {.name = "NVIDIA H100 80GB HBM3", .major = 9, .minor = 0, .warpSize = 32};

cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { (void)device; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return cudaSuccess; }
signed char _ZN3c104cuda12device_countEv(void) { return 1; }                              /* c10::cuda::device_count */
_Bool _ZN3c104cuda17hasPrimaryContextEa(signed char device) { (void)device; return 0; }   /* c10::cuda::hasPrimaryContext */
struct cudaDeviceProp *_ZN2at4cuda26getCurrentDevicePropertiesEv(void) { return &h100; }  /* at::cuda::getCurrentDeviceProperties */

/* Of libcuda, which torch opens by its name and asks for all of these. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 0; return 0; }
#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuCtxGetCurrent) NOTHING(cuCtxGetLimit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuDeviceGet)
NOTHING(cuDeviceGetAttribute) NOTHING(cuDevicePrimaryCtxRetain) NOTHING(cuDriverGetVersion) NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuModuleGetFunction) NOTHING(cuModuleLoadData)
NOTHING(cuPointerGetAttribute) NOTHING(cuLaunchKernelEx) NOTHING(cuOccupancyMaxActiveClusters) NOTHING(cuTensorMapEncodeTiled)
int cuGetErrorString(int error, const char **text) { (void)error; *text = "no driver"; return 0; }
