#pragma once
// The shim has the bfloat overloads that MLX builds from __metal_* internals.
