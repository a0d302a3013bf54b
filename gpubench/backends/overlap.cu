// Kernels beside a collective: a chain of small ones, and one that holds a stream back.

// What a thread of the chain does to its element: the step of a linear congruential generator, whose n-th step has a
// closed form, so that a result shows how many kernels have run.
extern "C" __global__ void next_value(unsigned* values, unsigned count) {
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) values[at] = values[at] * 1664525u + 1013904223u;
}

__device__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// One thread, which is gone before what stands behind it in its stream begins.
extern "C" __global__ void hold_back(unsigned long long duration) {
    const unsigned long long start = nanoseconds();
    while (nanoseconds() - start < duration) {
    }
}
