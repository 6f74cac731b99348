#ifndef OCTOPAGE_BACKENDS_CUDA_PAGED_ATTENTION_CUH_
#define OCTOPAGE_BACKENDS_CUDA_PAGED_ATTENTION_CUH_

// The portable attention kernel: row by row, mma.sync and cp.async, sm_80 and newer. Layouts and
// the division of work are drawn in traits.cuh. Every row is exact on its own: tokens that it does
// not see are never multiplied, whatever they hold.

#include <cstdint>

#include "backends/cuda/device/convert.cuh"
#include "backends/cuda/device/ptx/copy.cuh"
#include "backends/cuda/device/ptx/math.cuh"
#include "backends/cuda/device/ptx/mma.cuh"
#include "backends/cuda/paged/params.hpp"
#include "backends/cuda/paged/traits.cuh"

namespace octopage::cuda {

inline constexpr float kLn2 = 0.693147180559945309f;
inline constexpr float kLog2e = 1.44269504088896341f;

/// A page and how many of its tokens the row sees; page -1 and 0 tokens where there is none.
struct Entry {
  int32_t page;
  int32_t tokens;
};

/// The selection of one row and group.
struct RowSelection {
  int64_t first;           // planned: index of the first entry in the page list
  int64_t count;           // entries
  int64_t position;        // direct
  int64_t owner;           // direct
  const int32_t* regions;  // direct
  int32_t last_tokens;     // planned: tokens of the last entry
};

__device__ __forceinline__ RowSelection select_row(const PageSource& source, int64_t row,
                                                   int64_t group) {
  RowSelection selection = {};
  if (source.pages != nullptr) {
    // A caller can write to both, so what they say is cut as page_range() cuts it.
    const int64_t capacity = source.page_capacity;
    selection.first = min(max(int64_t{source.indptr[row]}, int64_t{0}), capacity);
    const int64_t most = min(capacity - selection.first, source.region_count);
    selection.count = min(max(int64_t{source.indptr[row + 1]} - selection.first, int64_t{0}), most);
    selection.last_tokens =
        min(max(source.last_page_len[row], 1), static_cast<int32_t>(kPageTokens));
    return selection;
  }
  const int64_t at = row * source.stride_positions;
  selection.position = source.wide_positions ? static_cast<const int64_t*>(source.positions)[at]
                                             : static_cast<const int32_t*>(source.positions)[at];
  selection.count = selection_count(selection.position, source.region_count);
  selection.owner = source.owners[row * source.stride_owners];
  selection.regions =
      source.regions + row * source.stride_regions_row + group * source.stride_regions_group;
  return selection;
}

/// Entry `index` of the selection, checked; the fault's bit goes to `faults`.
__device__ __forceinline__ Entry resolve(const PageSource& source, const RowSelection& selection,
                                         int64_t index, int32_t& faults) {
  if (index >= selection.count) return {-1, 0};
  if (source.pages != nullptr) {
    const int32_t page = source.pages[selection.first + index];
    if (page < 0 || page >= source.page_count) return {-1, 0};
    return {page, index + 1 == selection.count ? selection.last_tokens : int32_t{kPageTokens}};
  }
  const int32_t region = selection.regions[index * source.stride_regions_entry];
  const int64_t own = region_of_position(selection.position);
  const PageLookup page =
      page_of_region(source.table, source.geometry, selection.owner, region, own);
  faults |= page.fault;
  if (page.fault != 0) return {-1, 0};
  return {static_cast<int32_t>(page.page),
          region == own ? last_page_len(selection.position) : int32_t{kPageTokens}};
}

/// What a lane copies of every stage: it keeps its place in the tokens that are copied at once.
template <typename Traits>
struct CopyLane {
  static constexpr int kTokensAtOnce = 32 / Traits::kLanesOfToken;
  int token;          // in 0 .. kTokensAtOnce-1
  int64_t from;       // bytes from the page to the lane's first 16 bytes
  uint32_t key_to;    // bytes from the stage to where they go, for K
  uint32_t value_to;  // and for V

  __device__ __forceinline__ CopyLane(const PagedAttentionParams& p, int lane) {
    token = lane / Traits::kLanesOfToken;
    const int byte = lane % Traits::kLanesOfToken * 16;
    from = token * p.stride_token_bytes + byte;
    key_to = token * Traits::kKeyRowBytes + byte;
    value_to = kStepTokens * Traits::kKeyRowBytes + token * Traits::kValueRowBytes + byte;
  }
};

/// Starts the copy of two pages into a stage. Tokens that the row does not see become zeros.
template <typename Traits>
__device__ __forceinline__ void copy_stage(const PagedAttentionParams& p, const char* cache,
                                           uint32_t stage, const Entry (&entries)[2],
                                           const CopyLane<Traits>& lane) {
  constexpr int kTokensAtOnce = CopyLane<Traits>::kTokensAtOnce;
  constexpr int kRowBytes = Traits::kLanesOfToken * 16;  // of one token at a time
#pragma unroll
  for (int page = 0; page < 2; ++page) {
    const char* from = cache + max(entries[page].page, 0) * p.page_bytes + lane.from;
#pragma unroll
    for (int first = 0; first < 8; first += kTokensAtOnce) {
      // NOTE: with 0 bytes nothing is read, so an invalid entry's address only has to exist.
      const int bytes = first + lane.token < entries[page].tokens ? 16 : 0;
      const int token = page * 8 + first;
#pragma unroll
      for (int i = 0; i < Traits::kCopiesOfLane; ++i) {
        ptx::cp_async_16(stage + lane.key_to + token * Traits::kKeyRowBytes + i * kRowBytes,
                         from + i * kRowBytes, bytes);
      }
#pragma unroll
      for (int i = 0; i < Traits::kCopiesOfLane; ++i) {
        ptx::cp_async_16(stage + lane.value_to + token * Traits::kValueRowBytes + i * kRowBytes,
                         from + Traits::kTokenBytes + i * kRowBytes, bytes);
      }
      from += kTokensAtOnce * p.stride_token_bytes;
    }
  }
}

/// Eight neighbouring elements of the cache in shared memory as four pairs of the compute type.
template <typename Traits>
__device__ __forceinline__ void load_eight(const char* shared, uint32_t (&pairs)[4]) {
  if constexpr (Traits::kCacheIsF8) {
    const uint2 codes = *reinterpret_cast<const uint2*>(shared);
    pairs[0] = device::pair_from_f8(static_cast<uint16_t>(codes.x));
    pairs[1] = device::pair_from_f8(static_cast<uint16_t>(codes.x >> 16));
    pairs[2] = device::pair_from_f8(static_cast<uint16_t>(codes.y));
    pairs[3] = device::pair_from_f8(static_cast<uint16_t>(codes.y >> 16));
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(shared);
    pairs[0] = words.x;
    pairs[1] = words.y;
    pairs[2] = words.z;
    pairs[3] = words.w;
  }
}

/// Element i of two tokens as the pair i, of eight neighbouring elements.
template <typename Traits>
__device__ __forceinline__ void pair_tokens(const char* first, const char* second,
                                            uint32_t (&pairs)[8]) {
  if constexpr (Traits::kCacheIsF8) {
    const uint2 a = *reinterpret_cast<const uint2*>(first);
    const uint2 b = *reinterpret_cast<const uint2*>(second);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // two elements of either at a time
      const uint32_t codes =
          __byte_perm(i < 2 ? a.x : a.y, i < 2 ? b.x : b.y, i % 2 == 0 ? 0x5140 : 0x7362);
      pairs[2 * i] = device::pair_from_f8(static_cast<uint16_t>(codes));
      pairs[2 * i + 1] = device::pair_from_f8(static_cast<uint16_t>(codes >> 16));
    }
  } else {
    uint32_t a[4], b[4];
    load_eight<Traits>(first, a);
    load_eight<Traits>(second, b);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      pairs[i] = __byte_perm(a[i / 2], b[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
  }
}

/// This lane's query elements of heads g and g+8 as stored: dims 32i + 8c .. +7 in words[half][i].
/// Zeros for heads that do not exist. All loads are issued before the first is used.
template <typename Traits>
__device__ __forceinline__ void load_query(const PagedAttentionParams& p, int64_t row,
                                           int first_head, int heads, int lane,
                                           uint4 (&words)[2][Traits::kDim / 32]) {
  const int g = lane / 4, c = lane % 4;
  const auto* query = static_cast<const uint16_t*>(p.query) + row * p.stride_query_row + 8 * c;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < Traits::kDim / 32; ++i) words[half][i] = make_uint4(0, 0, 0, 0);
  }
  if (p.aligned_query != 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = g + 8 * half;
      const auto* from =
          reinterpret_cast<const uint4*>(query + (first_head + head) * p.stride_query_head);
      if (head < heads) {
#pragma unroll
        for (int i = 0; i < Traits::kDim / 32; ++i) words[half][i] = from[4 * i];
      }
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = g + 8 * half;
    const uint16_t* from = query + (first_head + head) * p.stride_query_head;
    if (head < heads) {
#pragma unroll
      for (int i = 0; i < Traits::kDim / 32; ++i) {
        uint32_t pairs[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          pairs[e] = from[32 * i + 2 * e] | uint32_t{from[32 * i + 2 * e + 1]} << 16;
        words[half][i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
}

/// Q's A fragments, and what each row's scores must be multiplied by to undo its scaling.
template <typename Traits>
struct QueryFragments {
  uint32_t parts[Traits::kQueryParts][Traits::kQuerySteps][4];
  float unscale[2] = {1.0f, 1.0f};

  __device__ __forceinline__ void load(const PagedAttentionParams& p, int64_t row, int first_head,
                                       int heads, int lane) {
    const typename Traits::Query query_tag = {};
    const typename Traits::Compute tag = {};
    uint4 words[2][Traits::kDim / 32];
    load_query<Traits>(p, row, first_head, heads, lane, words);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float scale = 1.0f;
      if constexpr (Traits::kScaledQuery) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < Traits::kDim / 32; ++i) {
          const uint32_t pairs[4] = {words[half][i].x, words[half][i].y, words[half][i].z,
                                     words[half][i].w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 pair = device::unpack(query_tag, pairs[e]);
            largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
          }
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const device::IntoF16 range(static_cast<int>(__float_as_uint(largest) >> 23) - 127);
        scale = range.factor;
        unscale[half] = range.back;
      }
#pragma unroll
      for (int i = 0; i < Traits::kDim / 32; ++i) {
        const uint32_t pairs[4] = {words[half][i].x, words[half][i].y, words[half][i].z,
                                   words[half][i].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // Pairs 0 | 1 | 2 | 3 are k 2c | k 2c+8 of step 2i, k 2c | k 2c+8 of step 2i+1.
          uint32_t& part = parts[0][2 * i + e / 2][e % 2 * 2 + half];
          if constexpr (std::is_same_v<typename Traits::Query, typename Traits::Compute>) {
            part = pairs[e];
          } else {
            const float2 pair = device::unpack(query_tag, pairs[e]);
            part = device::pack(tag, pair.x * scale, pair.y * scale);
            if constexpr (Traits::kQueryParts == 2) {
              const float2 high = device::unpack(tag, part);
              parts[1][2 * i + e / 2][e % 2 * 2 + half] =
                  device::pack(tag, pair.x - high.x, pair.y - high.y);
            }
          }
        }
      }
    }
  }

  /// [parts, steps, 32 lanes] of 16 bytes.
  __device__ __forceinline__ void store(uint4* shared, int lane) const {
#pragma unroll
    for (int part = 0; part < Traits::kQueryParts; ++part) {
#pragma unroll
      for (int step = 0; step < Traits::kQuerySteps; ++step) {
        const auto& a = parts[part][step];
        shared[(part * Traits::kQuerySteps + step) * 32 + lane] =
            make_uint4(a[0], a[1], a[2], a[3]);
      }
    }
  }
};

/// Running state of one warp: rows g and g+8 of a lane's fragments.
template <typename Traits>
struct WarpState {
  float sums[Traits::kDim / 8][4];  // O, n tile 8j+i = dims 64j + 8 column + i
  float largest[2];                 // running maximum of the scaled scores, in units of log2
  float normaliser[2];              // sum of this lane's rounded probabilities
  bool seen;                        // a token was visible
};

/// S = Q K^T of one stage: [16, D] x [16, D]^T -> [16, 16], page j in scores[j].
template <typename Traits>
__device__ __forceinline__ void stage_scores(const char* stage, const QueryFragments<Traits>& query,
                                             const uint4* shared_query, int lane,
                                             float (&scores)[2][4]) {
  const typename Traits::Compute tag = {};
  const int g = lane / 4, c = lane % 4;
  const char* keys =
      stage + Traits::token_of(g) * Traits::kKeyRowBytes + 8 * c * Traits::kElementBytes;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[j][e] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < Traits::kDim / 32; ++i) {
    uint32_t k[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_eight<Traits>(keys + j * 8 * Traits::kKeyRowBytes + i * 32 * Traits::kElementBytes,
                         k[j]);
    }
#pragma unroll
    for (int part = 0; part < Traits::kQueryParts; ++part) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t a[4];
        if constexpr (Traits::kQueryInShared) {
          const uint4 words = shared_query[(part * Traits::kQuerySteps + 2 * i + s) * 32 + lane];
          a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = query.parts[part][2 * i + s][e];
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
          ptx::mma_m16n8k16(tag, scores[j], a, k[j][2 * s], k[j][2 * s + 1]);
      }
    }
  }
}

/// Online softmax of one stage: scores become probabilities, packed as the A fragment of P V.
template <typename Traits>
__device__ __forceinline__ void stage_softmax(const int (&tokens)[2], const float (&scale_log2)[2],
                                              int lane, float (&scores)[2][4],
                                              WarpState<Traits>& state,
                                              uint32_t (&probabilities)[4]) {
  const typename Traits::Compute tag = {};
  const int c = lane % 4;
  float largest[2] = {state.largest[0], state.largest[1]};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool visible = Traits::token_of(2 * c + e % 2) < tokens[j];
      scores[j][e] = visible ? scores[j][e] * scale_log2[e / 2] : -INFINITY;
      largest[e / 2] = fmaxf(largest[e / 2], scores[j][e]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
  }
  // The older sums learn the new maximum only when one has changed.
  const bool changed = largest[0] != state.largest[0] || largest[1] != state.largest[1];
  if (__any_sync(~0u, changed)) {
    float correction[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = largest[half] == -INFINITY ? 0.0f : largest[half];
      correction[half] = exp2f(state.largest[half] - shift);
      state.normaliser[half] *= correction[half];
      state.largest[half] = largest[half];
    }
#pragma unroll
    for (int n = 0; n < Traits::kDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.sums[n][e] *= correction[e / 2];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Rows that have seen nothing yet subtract a number: exp2(-inf - 0) = 0, never NaN.
    const float shift = largest[half] == -INFINITY ? 0.0f : largest[half] - Traits::kHeadroom;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float low = ptx::exp2_approx(scores[j][2 * half] - shift),
                  high = ptx::exp2_approx(scores[j][2 * half + 1] - shift);
      const uint32_t pair = device::pack(tag, low, high);
      const float2 rounded = device::unpack(tag, pair);
      state.normaliser[half] += rounded.x + rounded.y;  // as they enter the product
      probabilities[2 * j + half] = pair;
    }
  }
}

/// O += P V of one stage: [16, 16] x [16, D] -> [16, D].
template <typename Traits>
__device__ __forceinline__ void stage_values(const char* stage, const uint32_t (&probabilities)[4],
                                             int lane, WarpState<Traits>& state) {
  const typename Traits::Compute tag = {};
  const int g = lane / 4, c = lane % 4;
  // Of columns 2c and 2c+1 in the first page; the second page is eight rows further.
  const char* values[2];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    values[t] = stage + kStepTokens * Traits::kKeyRowBytes +
                Traits::token_of(2 * c + t) * Traits::kValueRowBytes +
                8 * g * Traits::kElementBytes;
  }
#pragma unroll
  for (int j = 0; j < Traits::kDim / 64; ++j) {
    uint32_t b[2][8];
#pragma unroll
    for (int page = 0; page < 2; ++page) {
      const int at = page * 8 * Traits::kValueRowBytes + j * 64 * Traits::kElementBytes;
      pair_tokens<Traits>(values[0] + at, values[1] + at, b[page]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      ptx::mma_m16n8k16(tag, state.sums[8 * j + i], probabilities, b[0][i], b[1][i]);
  }
}

/// Adds up the warps' sums in shared memory, in the order of the warps, and writes the tile's
/// heads.
template <typename Traits>
__device__ __forceinline__ void merge_and_store(const PagedAttentionParams& p, char* shared,
                                                int64_t row, int first_head, int heads, int warps,
                                                WarpState<Traits>& state) {
  constexpr int kSumRow = Traits::kSumRow;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, c = lane % 4;
  auto* largest = reinterpret_cast<float*>(shared);    // [warps, 16]
  float* normaliser = largest + warps * kHeadsOfTile;  // [warps, 16]
  float* sums = normaliser + warps * kHeadsOfTile;     // [warps, 16, kSumRow]
  auto* seen = reinterpret_cast<int32_t*>(sums + warps * kHeadsOfTile * kSumRow);  // [warps]
  __syncthreads();  // the rings are free
  if (lane == 0) seen[warp] = state.seen ? 1 : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.normaliser[half] += __shfl_xor_sync(~0u, state.normaliser[half], 1);
    state.normaliser[half] += __shfl_xor_sync(~0u, state.normaliser[half], 2);
    if (c == 0) {
      largest[warp * kHeadsOfTile + g + 8 * half] = state.largest[half];
      normaliser[warp * kHeadsOfTile + g + 8 * half] = state.normaliser[half];
    }
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float* line = sums + (warp * kHeadsOfTile + g + 8 * half) * kSumRow;
#pragma unroll
      for (int n = 0; n < Traits::kDim / 8; n += 4) {
        const int dim = 64 * (n / 8) + 8 * (2 * c + column) + n % 8;
        *reinterpret_cast<float4*>(line + dim) =
            make_float4(state.sums[n][2 * half + column], state.sums[n + 1][2 * half + column],
                        state.sums[n + 2][2 * half + column], state.sums[n + 3][2 * half + column]);
      }
    }
  }
  __syncthreads();
  const float v_scale = p.v_scale != nullptr ? *p.v_scale : 1.0f;
  const typename Traits::Query tag = {};
  // A row without a token gives 0; one whose scores are all -inf gives NaN, as the formula does.
  bool empty = true;
  for (int w = 0; w < warps; ++w) empty = empty && seen[w] == 0;
  constexpr int kQuads = Traits::kDim / 4;
  for (int at = threadIdx.x; at < heads * kQuads; at += blockDim.x) {
    const int head = at / kQuads, dim = at % kQuads * 4;
    float top = -INFINITY;
    for (int w = 0; w < warps; ++w) top = fmaxf(top, largest[w * kHeadsOfTile + head]);
    const float shift = top == -INFINITY ? 0.0f : top;
    float total = 0.0f;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int w = 0; w < warps; ++w) {
      const int line = w * kHeadsOfTile + head;
      const float weight = exp2f(largest[line] - shift);
      total += normaliser[line] * weight;
      const float4 part = *reinterpret_cast<const float4*>(sums + line * kSumRow + dim);
      sum.x += part.x * weight;
      sum.y += part.y * weight;
      sum.z += part.z * weight;
      sum.w += part.w * weight;
    }
    const float factor = empty ? 0.0f : p.output_scale * v_scale / total;
    const float values[4] = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
    const int64_t to = row * p.stride_output_row + (first_head + head) * p.stride_output_head + dim;
    if (p.output_is_f32 != 0) {
      float* out = static_cast<float*>(p.output) + to;
      if (p.aligned_output != 0) {
        *reinterpret_cast<float4*>(out) = make_float4(values[0], values[1], values[2], values[3]);
      } else {
        for (int i = 0; i < 4; ++i) out[i] = values[i];
      }
    } else {
      auto* out = static_cast<uint16_t*>(p.output) + to;
      const uint32_t low = device::pack(tag, values[0], values[1]),
                     high = device::pack(tag, values[2], values[3]);
      if (p.aligned_output != 0) {
        *reinterpret_cast<uint2*>(out) = make_uint2(low, high);
      } else {
        out[0] = static_cast<uint16_t>(low), out[1] = static_cast<uint16_t>(low >> 16);
        out[2] = static_cast<uint16_t>(high), out[3] = static_cast<uint16_t>(high >> 16);
      }
    }
    if (p.lse != nullptr && dim == 0) {
      p.lse[row * p.stride_lse_row + (first_head + head) * p.stride_lse_head] =
          empty           ? -INFINITY
          : total == 0.0f ? NAN
                          : (top - Traits::kHeadroom + log2f(total)) * kLn2;
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kMaxWarps * 32)
    paged_attention(const __grid_constant__ PagedAttentionParams p) {
  extern __shared__ __align__(16) char shared[];
  if (p.only_if != nullptr && *p.only_if == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t unit = blockIdx.x;
  const int head_tile = static_cast<int>(unit % p.head_tiles);
  const int64_t group = unit / p.head_tiles % p.groups;
  const int64_t row = unit / p.head_tiles / p.groups;
  const int heads = min(kHeadsOfTile, p.heads_per_group - head_tile * kHeadsOfTile);
  const int first_head = static_cast<int>(group) * p.heads_per_group + head_tile * kHeadsOfTile;

  const RowSelection selection = select_row(p.source, row, group);
  const char* cache = p.cache + group * p.stride_group_bytes;
  char* ring = shared + Traits::kQueryFragmentBytes + warp * Traits::kStages * Traits::kStageBytes;
  const auto ring_address = static_cast<uint32_t>(__cvta_generic_to_shared(ring));

  // Lane l looks up entry l % 2 of pair (batch * 16 + l / 2) of this warp, one batch ahead.
  int32_t faults = 0;
  const int64_t pairs = (selection.count + 1) / 2;
  const int64_t steps = warp < pairs ? (pairs - warp + warps - 1) / warps : 0;
  const auto look_up = [&](int64_t batch) {
    const int64_t pair = (batch * 16 + lane / 2) * warps + warp;
    return resolve(p.source, selection, pair * 2 + lane % 2, faults);
  };
  Entry batch = look_up(0);
  Entry next_batch = look_up(1);
  const auto entries_of = [&](int64_t step, const Entry& from, Entry(&entries)[2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      entries[j].page = __shfl_sync(~0u, from.page, static_cast<int>(step % 16) * 2 + j);
      entries[j].tokens = __shfl_sync(~0u, from.tokens, static_cast<int>(step % 16) * 2 + j);
    }
  };

  QueryFragments<Traits> query;
  auto* shared_query = reinterpret_cast<uint4*>(shared);
  query.load(p, row, first_head, heads, lane);
  if constexpr (Traits::kQueryInShared) {
    if (warp == 0) query.store(shared_query, lane);
    __syncthreads();
  }
  const float scale = p.scale * kLog2e * (p.k_scale != nullptr ? *p.k_scale : 1.0f);
  const float scale_log2[2] = {scale * query.unscale[0], scale * query.unscale[1]};

  WarpState<Traits> state;
#pragma unroll
  for (int n = 0; n < Traits::kDim / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) state.sums[n][e] = 0.0f;
  }
  state.largest[0] = state.largest[1] = -INFINITY;
  state.normaliser[0] = state.normaliser[1] = 0.0f;
  state.seen = false;

  const CopyLane<Traits> copy_lane(p, lane);
  // Tokens of the pages that are under way, those of stage `step` in the byte step % kStages: four
  // bits to a page.
  uint32_t tokens_of_stages = 0;
  const auto copy = [&](int64_t step) {
    if (step < steps) {
      if (step % 16 == 0 && step > 0) {
        batch = next_batch;
        next_batch = look_up(step / 16 + 1);
      }
      const auto place = static_cast<uint32_t>(step % Traits::kStages);
      Entry coming[2];
      entries_of(step, batch, coming);
      const auto tokens = static_cast<uint32_t>(coming[0].tokens | coming[1].tokens << 4);
      tokens_of_stages = (tokens_of_stages & ~(0xffu << 8 * place)) | tokens << 8 * place;
      copy_stage<Traits>(p, cache, ring_address + place * Traits::kStageBytes, coming, copy_lane);
    }
    ptx::cp_async_commit();
  };
#pragma unroll
  for (int step = 0; step < Traits::kStages - 1; ++step) copy(step);
  for (int64_t step = 0; step < steps; ++step) {
    // All stages but this one are under way while it is computed.
    copy(step + Traits::kStages - 1);
    ptx::cp_async_wait<Traits::kStages - 1>();
    __syncwarp();
    const auto place = static_cast<uint32_t>(step % Traits::kStages);
    const char* stage = ring + place * Traits::kStageBytes;
    const uint32_t both = tokens_of_stages >> 8 * place;
    const int tokens[2] = {static_cast<int>(both & 15u), static_cast<int>(both >> 4 & 15u)};
    float scores[2][4];
    uint32_t probabilities[4];
    state.seen |= tokens[0] > 0 || tokens[1] > 0;
    stage_scores<Traits>(stage, query, shared_query, lane, scores);
    stage_softmax<Traits>(tokens, scale_log2, lane, scores, state, probabilities);
    stage_values<Traits>(stage, probabilities, lane, state);
    __syncwarp();  // the stage may be overwritten
  }
  ptx::cp_async_wait<0>();
  if (faults != 0 && p.status != nullptr) atomicOr(p.status, faults);
  merge_and_store<Traits>(p, shared + Traits::kQueryFragmentBytes, row, first_head, heads, warps,
                          state);
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_PAGED_ATTENTION_CUH_
