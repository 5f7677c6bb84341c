// Makes the kernel behind this text take so few registers that two blocks of 256 threads have room
// on a multiprocessor. MLX writes the kernel's first line, so its qualifier brings the bounds.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(256, 2)
