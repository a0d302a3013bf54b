// Test data on a GPU: what gpubench/collectives/pattern.py computes on arrays, one element a thread and step.
// The numbers of types and operations are those of gpubench/backends/cuda.py; operation -1 only moves data.

enum Type { INT8, UINT8, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };
enum Operation { MOVE = -1, SUM, PROD, MAX, MIN, AVG };

struct Pattern {
    int type, operation, ranks, contributors, lowest, neutral, tolerance_ulp;
};

__device__ bool is_float(int type) { return type >= FLOAT16; }

__device__ unsigned hash(unsigned index, unsigned seed, unsigned key) {
    unsigned bits = (index * 0x9E3779B1u) ^ seed ^ ((key + 1u) * 0x27D4EB2Fu);
    bits ^= bits >> 16;
    bits *= 0x7FEB352Du;
    bits ^= bits >> 15;
    bits *= 0x846CA68Bu;
    bits ^= bits >> 16;
    return bits;
}

__device__ int contribution(const Pattern& p, unsigned index, unsigned seed, unsigned turn) {
    unsigned random = hash(index, seed, turn);
    bool is_unsigned = p.type == UINT8;
    switch (p.operation) {
    case PROD: {
        int value = turn == 0 ? (int)(random % 7u) + 1 : turn <= 4 ? (int)(random & 1u) + 1 : 1;
        return !is_unsigned && ((random >> 8) & 1u) ? -value : value;
    }
    case AVG:
        return (int)(random % (is_float(p.type) ? 100u : 15u)) + 1;
    case SUM:
        return is_unsigned ? (int)(random % 16u) : (int)(random % 31u) - 15;
    default:
        return (int)(random % 200u) + p.lowest + (p.operation == MAX ? 1 : 0);
    }
}

__device__ unsigned long long encode(int type, double value) {
    switch (type) {
    case INT8:
    case UINT8:
        return (unsigned long long)(long long)value & 0xFFull;
    case INT32:
        return (unsigned)(int)value;
    case INT64:
        return (unsigned long long)(long long)value;
    case FLOAT16: {
        unsigned short half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"((float)value));
        return half;
    }
    case BFLOAT16: {
        unsigned bits = __float_as_uint((float)value);
        return (bits + ((bits >> 16) & 1u) + 0x7FFFu) >> 16;
    }
    case FLOAT32:
        return __float_as_uint((float)value);
    default:
        return (unsigned long long)__double_as_longlong(value);
    }
}

// What `rank` sends at an element; with a negative rank, the reduction over all ranks.
__device__ unsigned long long element(const Pattern& p, unsigned index, unsigned seed, int rank) {
    if (p.operation == MOVE) {
        unsigned long long low = hash(index, seed, rank);
        return low | ((unsigned long long)hash(index, seed, rank + p.ranks) << 32);
    }
    if (rank >= 0) {
        unsigned turn = ((index + seed) % p.ranks + rank) % p.ranks;
        return encode(p.type, turn < p.contributors ? contribution(p, index, seed, turn) : p.neutral);
    }
    int total = contribution(p, index, seed, 0);
    for (unsigned turn = 1; turn < p.contributors; ++turn) {
        int value = contribution(p, index, seed, turn);
        switch (p.operation) {
        case PROD: total *= value; break;
        case MAX: total = max(total, value); break;
        case MIN: total = min(total, value); break;
        default: total += value;
        }
    }
    if (p.operation != AVG) return encode(p.type, total);
    return encode(p.type, is_float(p.type) ? (double)total / p.ranks : (double)(total / p.ranks));
}

__device__ unsigned seed_of(unsigned row, unsigned buffer) {
    return (row * 0x85EBCA6Bu) ^ (buffer * 0xC2B2AE35u) ^ (row >> 16);
}

template <typename Bits>
__device__ void fill(const Pattern& p, Bits* data, long long stride, long long count, unsigned start, unsigned row,
                     int buffers, int rank) {
    for (int buffer = blockIdx.y; buffer < buffers; buffer += gridDim.y) {
        unsigned seed = seed_of(row, buffer);
        for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count;
             i += (long long)gridDim.x * blockDim.x)
            data[buffer * stride + i] = (Bits)element(p, start + (unsigned)i, seed, rank);
    }
}

template <typename Bits>
__device__ unsigned long long wrong(const Pattern& p, const Bits* data, long long stride, long long count,
                                    unsigned start, unsigned row, int buffers, int rank) {
    unsigned long long found = 0;
    for (int buffer = blockIdx.y; buffer < buffers; buffer += gridDim.y) {
        unsigned seed = seed_of(row, buffer);
        for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count;
             i += (long long)gridDim.x * blockDim.x) {
            Bits got = data[buffer * stride + i], expected = (Bits)element(p, start + (unsigned)i, seed, rank);
            // Averages are of positive values, so their bits order as the values do.
            Bits distance = got > expected ? got - expected : expected - got;
            found += distance > (Bits)p.tolerance_ulp;
        }
    }
    return found;
}

extern "C" __global__ void fill_sent(int type, int operation, int ranks, int contributors, int lowest, int neutral,
                                     int tolerance_ulp, int width, void* data, long long stride, long long count,
                                     unsigned start, unsigned row, int buffers, int rank) {
    Pattern p = {type, operation, ranks, contributors, lowest, neutral, tolerance_ulp};
    switch (width) {
    case 1: fill(p, (unsigned char*)data, stride, count, start, row, buffers, rank); break;
    case 2: fill(p, (unsigned short*)data, stride, count, start, row, buffers, rank); break;
    case 4: fill(p, (unsigned*)data, stride, count, start, row, buffers, rank); break;
    default: fill(p, (unsigned long long*)data, stride, count, start, row, buffers, rank);
    }
}

extern "C" __global__ void count_wrong(int type, int operation, int ranks, int contributors, int lowest, int neutral,
                                       int tolerance_ulp, int width, const void* data, long long stride,
                                       long long count, unsigned start, unsigned row, int buffers, int rank,
                                       unsigned long long* total) {
    Pattern p = {type, operation, ranks, contributors, lowest, neutral, tolerance_ulp};
    unsigned long long found;
    switch (width) {
    case 1: found = wrong(p, (const unsigned char*)data, stride, count, start, row, buffers, rank); break;
    case 2: found = wrong(p, (const unsigned short*)data, stride, count, start, row, buffers, rank); break;
    case 4: found = wrong(p, (const unsigned*)data, stride, count, start, row, buffers, rank); break;
    default: found = wrong(p, (const unsigned long long*)data, stride, count, start, row, buffers, rank);
    }
    if (found) atomicAdd(total, found);
}
