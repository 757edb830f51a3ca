// All kernels as one image: what nvcc compiles (kernels/build.sh).
#include "attention.cu"
#include "elementwise.cu"
#include "matmul.cu"
#include "mma.cu"
#include "norm.cu"
#include "sampling.cu"
#include "spin.cu"
#include "wgmma.cu"
