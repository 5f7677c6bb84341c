// Makes the kernel behind this text take so few registers that several blocks have room on a
// multiprocessor: RESIDENT is a block's threads, then the blocks. MLX writes the kernel's first
// line, so its qualifier brings the bounds.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(RESIDENT)
