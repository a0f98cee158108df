/* The definitions that NVIDIA's headers of types need from a header in another package. */

#define __host__
#define __device__
#define __device_builtin__
#define __cuda_builtin_vector_align8(tag, members) struct tag { members } __attribute__((aligned(8)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __VECTOR_TYPE_DEPRECATED__(text)
#define __CUDA_DEPRECATED
