// What MLX puts before every kernel.
#include <metal_stdlib>
#include "mlx/backend/metal/kernels/utils.h"
