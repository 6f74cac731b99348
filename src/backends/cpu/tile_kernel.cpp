// Scalable vectors (SVE, RVV) cannot be held in arrays; SSE machines take the portable version.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/tile_kernel.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Per-target headers follow.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "backends/cpu/tile_kernel.hpp"
#include "core/dtype.hpp"

HWY_BEFORE_NAMESPACE();
namespace octopage {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using U32 = hn::Repartition<uint32_t, F32>;
using Vec = hn::Vec<F32>;

constexpr size_t kLanes = HWY_LANES(float);
// Accumulators in registers: 16 of 32, or 8 of 16.
constexpr int kAccumulators = kLanes >= 16 ? 16 : 8;
constexpr int64_t kDotBlock = 32;  // divides every head dim
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// --- conversion of a page -------------------------------------------------------------------

HWY_INLINE Vec LoadBf16(F32 df, const uint16_t* from) {
  const hn::Rebind<uint16_t, F32> du16;
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(du16, from))));
}

HWY_INLINE Vec LoadF16(F32 df, const uint16_t* from) {
  const hn::Rebind<hwy::float16_t, F32> df16;
  const hn::Rebind<uint16_t, F32> du16;
  return hn::PromoteTo(df, hn::BitCast(df16, hn::LoadU(du16, from)));
}

// e4m3 to f32 by moving the bits: exponent bias 7 -> 127. Subnormal codes (exponent 0) are read as
// 2^-6 + m * 2^-9 and lose the 2^-6 again; code 0x7f is NaN.
HWY_INLINE Vec LoadF8(F32 df, const uint8_t* from) {
  const U32 du;
  const hn::Rebind<uint8_t, F32> du8;
  const auto code = hn::PromoteTo(du, hn::LoadU(du8, from));
  const auto magnitude = hn::And(code, hn::Set(du, 0x7fu));
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(du, 0x80u)));
  const auto bits = hn::ShiftLeft<20>(magnitude);
  const Vec normal = hn::BitCast(df, hn::Add(bits, hn::Set(du, 120u << 23)));
  const Vec subnormal =
      hn::Sub(hn::BitCast(df, hn::Add(bits, hn::Set(du, 121u << 23))), hn::Set(df, 0x1p-6f));
  const auto is_subnormal = hn::RebindMask(df, hn::Lt(magnitude, hn::Set(du, 8u)));
  const auto is_nan = hn::RebindMask(df, hn::Eq(magnitude, hn::Set(du, 0x7fu)));
  const Vec value = hn::IfThenElse(is_subnormal, subnormal, normal);
  const Vec signed_value = hn::Or(value, hn::BitCast(df, sign));
  return hn::IfThenElse(is_nan, hn::Set(df, std::numeric_limits<float>::quiet_NaN()), signed_value);
}

HWY_INLINE Vec LoadElement(F32 df, const uint16_t* from, hwy::SizeTag<1>) {
  return LoadBf16(df, from);
}
HWY_INLINE Vec LoadElement(F32 df, const uint16_t* from, hwy::SizeTag<2>) {
  return LoadF16(df, from);
}
HWY_INLINE Vec LoadElement(F32 df, const uint8_t* from, hwy::SizeTag<3>) {
  return LoadF8(df, from);
}

// Converts eight tokens; true if V of one of the first `visible` holds a NaN or an infinity.
template <typename T, size_t kKind>
bool ConvertPageAs(const T* page, int64_t stride_token, int64_t dim, int64_t visible, float* k,
                   float* v) {
  const F32 df;
  const Vec zero = hn::Zero(df);
  Vec finite = zero;  // stays zero only while it meets finite numbers: x * 0 is NaN otherwise
  for (int64_t token = 0; token < kPageTokens; ++token) {
    const T* row = page + token * stride_token;
    float* k_row = k + token * kTokenStride;
    float* v_row = v + token * kTokenStride;
    const bool counts = token < visible;
    for (size_t d = 0; d < static_cast<size_t>(dim); d += kLanes) {
      hn::Store(LoadElement(df, row + d, hwy::SizeTag<kKind>()), df, k_row + d);
      const Vec value = LoadElement(df, row + dim + d, hwy::SizeTag<kKind>());
      hn::Store(value, df, v_row + d);
      if (counts) finite = hn::MulAdd(value, zero, finite);
    }
  }
  return !hn::AllTrue(df, hn::Eq(finite, zero));
}

bool ConvertPage(const TileJob& job, int64_t offset, int64_t visible, float* k, float* v) {
  switch (job.cache_dtype) {
    case DType::bf16:
      return ConvertPageAs<uint16_t, 1>(static_cast<const uint16_t*>(job.cache) + offset,
                                        job.stride_token, job.dim, visible, k, v);
    case DType::f16:
      return ConvertPageAs<uint16_t, 2>(static_cast<const uint16_t*>(job.cache) + offset,
                                        job.stride_token, job.dim, visible, k, v);
    default:
      return ConvertPageAs<uint8_t, 3>(static_cast<const uint8_t*>(job.cache) + offset,
                                       job.stride_token, job.dim, visible, k, v);
  }
}

// --- one pack and one chunk -----------------------------------------------------------------

// A page of the chunk as one pack sees it.
struct PackPage {
  const float* k;  // [8, kTokenStride]
  const float* v;  // [8, kTokenStride]
  const float*
      limit;       // [lanes] visible tokens of each lane's row; null where all lanes see `tokens`
  int64_t tokens;  // visible to at least one row of the pack
  bool exact;      // V may be non-finite where a lane must not see it
};

// Scores of kTokens neighbouring tokens: S[token][lane] = sum_d K[token][d] * Q[d][lane].
// NOTE: the sum runs in blocks of kDotBlock terms. One long f32 chain would lose twice the digits
// that the contract's 1e-5 for f32 output leaves at scores of 64.
template <int kTokens, int kVectors>
HWY_INLINE void Scores(const float* HWY_RESTRICT query, size_t width, int64_t dim,
                       const float* HWY_RESTRICT k, float* HWY_RESTRICT scores) {
  const F32 df;
  for (int64_t block = 0; block < dim; block += kDotBlock) {
    Vec sum[kTokens][kVectors];
    HWY_UNROLL(16)
    for (int t = 0; t < kTokens; ++t) {
      HWY_UNROLL(2)
      for (int j = 0; j < kVectors; ++j) sum[t][j] = hn::Zero(df);
    }
    for (int64_t d = block; d < block + kDotBlock; ++d) {
      Vec q[kVectors];
      HWY_UNROLL(2)
      for (int j = 0; j < kVectors; ++j)
        q[j] = hn::Load(df, query + static_cast<size_t>(d) * width + j * kLanes);
      HWY_UNROLL(16)
      for (int t = 0; t < kTokens; ++t) {
        const Vec key = hn::Set(df, k[t * kTokenStride + d]);
        HWY_UNROLL(2)
        for (int j = 0; j < kVectors; ++j) sum[t][j] = hn::MulAdd(key, q[j], sum[t][j]);
      }
    }
    HWY_UNROLL(16)
    for (int t = 0; t < kTokens; ++t) {
      HWY_UNROLL(2)
      for (int j = 0; j < kVectors; ++j) {
        float* score = scores + t * width + j * kLanes;
        if (block > 0) sum[t][j] = hn::Add(sum[t][j], hn::Load(df, score));
        hn::Store(sum[t][j], df, score);
      }
    }
  }
}

// Cache rows of pages that come next, fetched a few lines at a time while the products run.
class Prefetcher {
 public:
  Prefetcher(const TileJob& job, int64_t begin, int64_t end)
      : job_(job), page_(begin), end_(end), element_bytes_(itemsize(job.cache_dtype)) {}
  // One token's K and V.
  HWY_INLINE void Step() {
    if (page_ >= end_) return;
    const char* row = static_cast<const char*>(job_.cache) +
                      (job_.pages[page_].offset + token_ * job_.stride_token) * element_bytes_;
    for (int64_t at = 0; at < 2 * job_.dim * element_bytes_; at += 64)
      __builtin_prefetch(row + at, 0, 2);
    if (++token_ == kPageTokens) {
      token_ = 0;
      ++page_;
    }
  }

 private:
  const TileJob& job_;
  int64_t page_;
  int64_t end_;
  int64_t token_ = 0;
  int64_t element_bytes_;
};

// Scores of all pages of the pack, [pages * 8, width].
void AllScores(const float* query, size_t vectors, int64_t dim, const PackPage* pages,
               int64_t count, float* scores, Prefetcher& prefetcher) {
  const size_t width = vectors * kLanes;
  const auto run = [&](auto tokens, auto step, size_t j) {
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t t = 0; t < 4; ++t) prefetcher.Step();
      for (int64_t t = 0; t < kPageTokens; t += tokens()) {
        Scores<tokens(), step()>(
            query + j * kLanes, width, dim, pages[p].k + t * kTokenStride,
            scores + static_cast<size_t>(p * kPageTokens + t) * width + j * kLanes);
      }
    }
  };
  size_t j = 0;
  constexpr int kTokensOfTwo = std::min(kAccumulators / 2, 8);
  for (; j + 2 <= vectors; j += 2) {
    run(std::integral_constant<int, kTokensOfTwo>(), std::integral_constant<int, 2>(), j);
  }
  if (j < vectors) run(std::integral_constant<int, 8>(), std::integral_constant<int, 1>(), j);
}

// Lanes whose row sees token `t`.
HWY_INLINE hn::Mask<F32> Visible(const PackPage& page, int64_t t, size_t vector) {
  const F32 df;
  return hn::Gt(hn::Load(df, page.limit + vector * kLanes), hn::Set(df, static_cast<float>(t)));
}

// Online softmax: S becomes P = exp(S - largest), and the older sums learn their correction.
void Softmax(const PackPage* pages, int64_t count, size_t vectors, float* scores, float* largest,
             float* normaliser, float* correction) {
  const F32 df;
  const size_t width = vectors * kLanes;
  const Vec minus_infinity = hn::Set(df, -kInfinity);
  for (size_t j = 0; j < vectors; ++j) {
    const Vec before = hn::Load(df, largest + j * kLanes);
    Vec most = before;
    for (int64_t p = 0; p < count; ++p) {
      float* s = scores + static_cast<size_t>(p) * 8 * width + j * kLanes;
      for (int64_t t = 0; t < pages[p].tokens; ++t) {
        Vec score = hn::Load(df, s + static_cast<size_t>(t) * width);
        if (pages[p].limit != nullptr) {
          score = hn::IfThenElse(Visible(pages[p], t, j), score, minus_infinity);
          hn::Store(score, df, s + static_cast<size_t>(t) * width);
        }
        most = hn::Max(score, most);
      }
    }
    // Lanes that have seen nothing yet subtract 0, so that exp(-inf - 0) = 0 and never NaN.
    const Vec shift = hn::IfThenElse(hn::Eq(most, minus_infinity), hn::Zero(df), most);
    const Vec rescale = hn::Exp(df, hn::Sub(before, shift));
    Vec sum = hn::Mul(hn::Load(df, normaliser + j * kLanes), rescale);
    for (int64_t p = 0; p < count; ++p) {
      float* s = scores + static_cast<size_t>(p) * 8 * width + j * kLanes;
      for (int64_t t = 0; t < pages[p].tokens; ++t) {
        const Vec x = hn::Sub(hn::Load(df, s + static_cast<size_t>(t) * width), shift);
        // NOTE: Exp maps NaN to 0, but a NaN score must show in its row.
        const Vec weight = hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(df, x));
        hn::Store(weight, df, s + static_cast<size_t>(t) * width);
        sum = hn::Add(sum, weight);
      }
    }
    hn::Store(most, df, largest + j * kLanes);
    hn::Store(sum, df, normaliser + j * kLanes);
    hn::Store(rescale, df, correction + j * kLanes);
  }
}

// O[d][lane] = O[d][lane] * correction[lane] + sum_token V[token][d] * P[token][lane], for kDims
// neighbouring d and kVectors neighbouring vectors.
template <int kDims, int kVectors>
HWY_INLINE void WeightedSum(const PackPage* pages, int64_t count, const float* HWY_RESTRICT weights,
                            size_t width, size_t first_vector, int64_t d, const float* correction,
                            float* HWY_RESTRICT sums) {
  const F32 df;
  Vec sum[kDims][kVectors];
  HWY_UNROLL(16)
  for (int i = 0; i < kDims; ++i) {
    HWY_UNROLL(2)
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = hn::Mul(hn::Load(df, sums + i * width + j * kLanes),
                          hn::Load(df, correction + j * kLanes));
    }
  }
  for (int64_t p = 0; p < count; ++p) {
    const float* v = pages[p].v + d;
    const float* w = weights + static_cast<size_t>(p) * 8 * width;
    if (HWY_UNLIKELY(pages[p].exact)) {
      // 0 * NaN: a lane that does not see the token must not meet its V at all.
      for (int64_t t = 0; t < pages[p].tokens; ++t, v += kTokenStride, w += width) {
        for (int j = 0; j < kVectors; ++j) {
          const auto sees = Visible(pages[p], t, first_vector + static_cast<size_t>(j));
          const Vec weight = hn::Load(df, w + j * kLanes);
          for (int i = 0; i < kDims; ++i) {
            sum[i][j] =
                hn::IfThenElse(sees, hn::MulAdd(hn::Set(df, v[i]), weight, sum[i][j]), sum[i][j]);
          }
        }
      }
      continue;
    }
    for (int64_t t = 0; t < pages[p].tokens; ++t, v += kTokenStride, w += width) {
      Vec weight[kVectors];
      HWY_UNROLL(2)
      for (int j = 0; j < kVectors; ++j) weight[j] = hn::Load(df, w + j * kLanes);
      HWY_UNROLL(16)
      for (int i = 0; i < kDims; ++i) {
        const Vec value = hn::Set(df, v[i]);
        HWY_UNROLL(2)
        for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(value, weight[j], sum[i][j]);
      }
    }
  }
  HWY_UNROLL(16)
  for (int i = 0; i < kDims; ++i) {
    HWY_UNROLL(2)
    for (int j = 0; j < kVectors; ++j) hn::Store(sum[i][j], df, sums + i * width + j * kLanes);
  }
}

void AllWeightedSums(const PackPage* pages, int64_t count, const float* weights, size_t vectors,
                     int64_t dim, const float* correction, float* sums, Prefetcher& prefetcher) {
  const size_t width = vectors * kLanes;
  for (size_t j = 0; j < vectors;) {
    const size_t lane = j * kLanes;
    if (vectors - j >= 2) {
      constexpr int kDims = kAccumulators / 2;
      for (int64_t d = 0; d < dim; d += kDims) {
        prefetcher.Step();
        WeightedSum<kDims, 2>(pages, count, weights + lane, width, j, d, correction + lane,
                              sums + static_cast<size_t>(d) * width + lane);
      }
      j += 2;
    } else {
      for (int64_t d = 0; d < dim; d += kAccumulators) {
        prefetcher.Step();
        prefetcher.Step();
        WeightedSum<kAccumulators, 1>(pages, count, weights + lane, width, j, d, correction + lane,
                                      sums + static_cast<size_t>(d) * width + lane);
      }
      j += 1;
    }
  }
}

// --- a tile ---------------------------------------------------------------------------------

// Q[d][lane] of a pack, scale folded in; unused lanes are zero.
void LoadQuery(const TileJob& job, int64_t first_row, int64_t rows, size_t width, float* query) {
  std::fill_n(query, static_cast<size_t>(job.dim) * width, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < job.heads; ++h) {
      const int64_t from =
          job.row_ids[first_row + r] * job.stride_query_row + h * job.stride_query_head;
      float* lane = query + r * job.heads + h;
      const auto* bits = static_cast<const uint16_t*>(job.query) + from;
      for (int64_t d = 0; d < job.dim; ++d) {
        const float value =
            job.query_dtype == DType::bf16 ? bf16_to_f32(bits[d]) : f16_to_f32(bits[d]);
        lane[static_cast<size_t>(d) * width] =
            static_cast<float>(static_cast<double>(value) * job.scale);
      }
    }
  }
}

// out = O / sum * v_scale, lse = largest + log(sum); a row that saw no token gives 0 and -inf. One
// that saw tokens and has a sum of 0 (all scores -inf) gives NaN, as the formula does.
void StoreRows(const TileJob& job, int64_t first_row, int64_t rows, size_t width, const bool* seen,
               const float* sums, const float* largest, const float* normaliser) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = job.row_ids[first_row + r];
    for (int64_t h = 0; h < job.heads; ++h) {
      const int64_t lane = r * job.heads + h;
      const bool empty = !seen[first_row + r];
      const auto factor =
          static_cast<float>(empty ? 0.0 : job.v_scale / static_cast<double>(normaliser[lane]));
      const int64_t to = row * job.stride_output_row + h * job.stride_output_head;
      const float* sum = sums + lane;
      if (job.output_dtype == DType::bf16) {
        uint16_t* out = static_cast<uint16_t*>(job.output) + to;
        for (int64_t d = 0; d < job.dim; ++d)
          out[d] = f32_to_bf16(sum[static_cast<size_t>(d) * width] * factor);
      } else {
        for (int64_t d = 0; d < job.dim; ++d) {
          store_f32(job.output, job.output_dtype, to + d,
                    sum[static_cast<size_t>(d) * width] * factor);
        }
      }
      if (job.lse != nullptr) {
        job.lse[row * job.stride_lse_row + h * job.stride_lse_head] =
            empty                      ? -kInfinity
            : normaliser[lane] == 0.0f ? NAN
                                       : largest[lane] + std::log(normaliser[lane]);
      }
    }
  }
}

// Converts pages [begin, end) of the tile and notes what each row sees of them.
void LoadChunk(const TileJob& job, int64_t begin, int64_t end, bool* nonfinite, bool* seen) {
  const TileScratch& s = job.scratch;
  std::fill_n(s.visible, kChunkPages * kMaxTileRows, uint8_t{0});
  for (int64_t p = begin; p < end; ++p) {
    const TilePage& page = job.pages[p];
    uint8_t* visible = s.visible + (p - begin) * kMaxTileRows;
    int64_t most = 0;
    for (int64_t i = page.first_key; i < page.end_key; ++i) {
      uint8_t& row = visible[PageKey::row(job.keys[i])];
      row = std::max(row, static_cast<uint8_t>(PageKey::visible(job.keys[i])));
      most = std::max<int64_t>(most, row);
      seen[PageKey::row(job.keys[i])] = true;
    }
    const int64_t slot = (p - begin) * kPageTokens * kTokenStride;
    nonfinite[p - begin] = ConvertPage(job, page.offset, most, s.k + slot, s.v + slot);
  }
}

// The pages of the chunk that rows [first_row, first_row + rows) of the tile see.
int64_t PagesOfPack(const TileJob& job, int64_t chunk_pages, int64_t first_row, int64_t rows,
                    const bool* nonfinite, float* limits, PackPage* pages) {
  const TileScratch& s = job.scratch;
  int64_t count = 0;
  for (int64_t p = 0; p < chunk_pages; ++p) {
    const uint8_t* visible = s.visible + p * kMaxTileRows + first_row;
    const auto [least, most] = std::minmax_element(visible, visible + rows);
    if (*most == 0) continue;
    const int64_t slot = p * kPageTokens * kTokenStride;
    PackPage& page = pages[count++];
    page = {.k = s.k + slot, .v = s.v + slot, .limit = nullptr, .tokens = *most, .exact = false};
    if (*least == *most) continue;
    // Several rows share the pack and see different parts of the page. Such a pack is one vector.
    float* limit = limits + p * static_cast<int64_t>(kLanes);
    std::fill_n(limit, kLanes, 0.0f);
    for (int64_t r = 0; r < rows; ++r)
      std::fill_n(limit + r * job.heads, job.heads, static_cast<float>(visible[r]));
    page.limit = limit;
    page.exact = nonfinite[p];
  }
  return count;
}

void AttendTile(const TileJob& job) {
  const TileScratch& s = job.scratch;
  const PackShape pack = PackShape::of(job.heads, job.rows, static_cast<int64_t>(kLanes));
  const auto vectors = static_cast<size_t>(pack.vectors);
  const size_t width = vectors * kLanes;
  const auto pack_elements = static_cast<size_t>(job.dim) * width;
  const int64_t packs = (job.rows + pack.rows - 1) / pack.rows;
  const auto rows_of = [&](int64_t i) { return std::min(pack.rows, job.rows - i * pack.rows); };
  for (int64_t i = 0; i < packs; ++i) {
    LoadQuery(job, i * pack.rows, rows_of(i), width,
              s.query + static_cast<size_t>(i) * pack_elements);
  }
  std::fill_n(s.sums, static_cast<size_t>(packs) * pack_elements, 0.0f);
  std::fill_n(s.largest, static_cast<size_t>(packs) * width, -kInfinity);
  std::fill_n(s.normaliser, static_cast<size_t>(packs) * width, 0.0f);

  HWY_ALIGN float limits[kChunkPages * kLanes];
  bool nonfinite[kChunkPages];
  bool seen[kMaxTileRows] = {};
  PackPage pages[kChunkPages];
  for (int64_t begin = 0; begin < job.page_count; begin += kChunkPages) {
    const int64_t end = std::min(job.page_count, begin + kChunkPages);
    LoadChunk(job, begin, end, nonfinite, seen);
    Prefetcher prefetcher(job, end, std::min(job.page_count, end + kChunkPages));
    for (int64_t i = 0; i < packs; ++i) {
      const int64_t count =
          PagesOfPack(job, end - begin, i * pack.rows, rows_of(i), nonfinite, limits, pages);
      if (count == 0) continue;
      const size_t at = static_cast<size_t>(i);
      AllScores(s.query + at * pack_elements, vectors, job.dim, pages, count, s.scores, prefetcher);
      Softmax(pages, count, vectors, s.scores, s.largest + at * width, s.normaliser + at * width,
              s.correction);
      AllWeightedSums(pages, count, s.scores, vectors, job.dim, s.correction,
                      s.sums + at * pack_elements, prefetcher);
    }
  }
  for (int64_t i = 0; i < packs; ++i) {
    const size_t at = static_cast<size_t>(i);
    StoreRows(job, i * pack.rows, rows_of(i), width, seen, s.sums + at * pack_elements,
              s.largest + at * width, s.normaliser + at * width);
  }
}

int64_t Lanes() {
  return static_cast<int64_t>(kLanes);
}
const char* Target() {
  return hwy::TargetName(HWY_TARGET);
}

}  // namespace

// Highway's tables need names outside the anonymous namespace.
void AttendTileOfTarget(const TileJob& job) {
  AttendTile(job);
}
int64_t LanesOfTarget() {
  return Lanes();
}
const char* NameOfTarget() {
  return Target();
}

}  // namespace HWY_NAMESPACE
}  // namespace octopage
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace octopage {

HWY_EXPORT(AttendTileOfTarget);
HWY_EXPORT(LanesOfTarget);
HWY_EXPORT(NameOfTarget);

int64_t tile_lanes() {
  return HWY_DYNAMIC_DISPATCH(LanesOfTarget)();
}
const char* tile_target() {
  return HWY_DYNAMIC_DISPATCH(NameOfTarget)();
}
void attend_tile(const TileJob& job) {
  HWY_DYNAMIC_DISPATCH(AttendTileOfTarget)(job);
}

}  // namespace octopage

#endif  // HWY_ONCE
