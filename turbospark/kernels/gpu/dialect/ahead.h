// What threadgroups with nothing else to do bring near for the next launch: kernels/gpu/ahead.py.

// Has threadgroup `block`'s share of BYTES behind `words` brought into the second-level cache. They
// go to the threadgroups piece by piece, and in each to its SIMD-groups in turn.
template <int BYTES, int BLOCKS, int PIECE, int WAIT>
FUNC void bring_near(const GLOBAL uint* words, int block, int thread_index, int threads) {
#ifdef __CUDA_ARCH__
  __nanosleep(WAIT);  // what the others wait for goes first
#endif
  const int place = thread_index % 32 * (threads / 32) + thread_index / 32;
  for (int piece = place * BLOCKS + block; piece < BYTES / PIECE; piece += threads * BLOCKS) {
    fetch_bytes(words + piece * (PIECE / 4), PIECE);
  }
}

// Such a threadgroup ends here; a block below 0 is one that works.
#define BRING_NEAR(words, block, thread_index, threads)                   \
  if ((block) >= 0) {                                                     \
    bring_near<AHEAD_BYTES, AHEAD_BLOCKS, AHEAD_PIECE, AHEAD_WAIT>(       \
        (words) + AHEAD_WORD, block, thread_index, threads);              \
    return;                                                               \
  }
