// A copy by the SMs of the GPU that it runs on; either end may be another GPU's memory, or pinned memory of the host.

// Loads that a thread has under way at once: enough to hide the way to another GPU and back.
const int IN_FLIGHT = 4;

extern "C" __global__ void copy_bytes(void* destination, const void* source, unsigned long long size_bytes) {
    const unsigned long long threads = gridDim.x * (unsigned long long)blockDim.x;
    const unsigned long long thread = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    const bool aligned = (((unsigned long long)destination | (unsigned long long)source) & 15) == 0;
    const unsigned long long vectors = aligned ? size_bytes / 16 : 0;
    const uint4* from = (const uint4*)source;
    uint4* to = (uint4*)destination;

    unsigned long long at = thread;
    for (; at + (IN_FLIGHT - 1) * threads < vectors; at += IN_FLIGHT * threads) {
        uint4 held[IN_FLIGHT];
#pragma unroll
        for (int turn = 0; turn < IN_FLIGHT; ++turn) held[turn] = from[at + turn * threads];
#pragma unroll
        for (int turn = 0; turn < IN_FLIGHT; ++turn) to[at + turn * threads] = held[turn];
    }
    for (; at < vectors; at += threads) to[at] = from[at];
    for (at = vectors * 16 + thread; at < size_bytes; at += threads)
        ((unsigned char*)destination)[at] = ((const unsigned char*)source)[at];
}
