#include "step/synthetic.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/dtype.hpp"
#include "octopage/page_arithmetic.hpp"
#include "step/tensor_storage.hpp"

namespace octopage {
namespace {

/// Random numbers that are the same everywhere: the standard fixes the engine but not its
/// distributions, so those are written out here.
class Random {
 public:
  /// Streams with different numbers are independent, so that none moves when another grows.
  Random(uint64_t seed, uint64_t stream)
      : engine_(seed * 0x9e3779b97f4a7c15u + stream * 0xd1b54a32d192ed03u + 1) {}

  uint64_t bits() { return engine_(); }

  /// Even in [0, bound).
  int64_t below(int64_t bound) {
    const auto limit = static_cast<uint64_t>(bound);
    const uint64_t reject_from = std::numeric_limits<uint64_t>::max() / limit * limit;
    uint64_t value = engine_();
    while (value >= reject_from) value = engine_();
    return static_cast<int64_t>(value % limit);
  }

 private:
  std::mt19937_64 engine_;
};

/// Near-normal numbers of standard deviation 1, rounded to one dtype: the sum of the four 16-bit
/// parts of a random word, looked up in a table of codes.
class NormalCodes {
 public:
  explicit NormalCodes(DType dtype) : dtype_(dtype), codes_(kSums) {
    for (int64_t sum = 0; sum < kSums; ++sum) {
      // Four even numbers on 0 .. 65535: mean 131070, standard deviation 65536 / sqrt(3).
      const auto value = static_cast<float>((static_cast<double>(sum) - 131070.0) *
                                            (1.7320508075688772 / 65536.0));
      auto& code = codes_[static_cast<size_t>(sum)];
      if (dtype == DType::bf16) {
        code = f32_to_bf16(value);
      } else if (dtype == DType::f16) {
        code = f32_to_f16(value);
      } else {
        code = f32_to_f8_e4m3fn(value);
      }
    }
  }

  /// Fills elements `[begin, end)` of a tensor of the dtype.
  void fill(void* data, int64_t begin, int64_t end, Random& random) const {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t word = random.bits();
      const uint64_t sum =
          (word & 0xffff) + (word >> 16 & 0xffff) + (word >> 32 & 0xffff) + (word >> 48);
      store(data, i, codes_[sum]);
    }
  }

  /// Fills with NaN and both infinities (f8 has none: both NaNs) or with zeros.
  void fill_unwritten(void* data, int64_t begin, int64_t end, bool poison) const {
    for (int64_t i = begin; i < end; ++i) store(data, i, poison ? poison_code(i) : uint16_t{0});
  }

 private:
  static constexpr int64_t kSums = 4 * 65535 + 1;

  uint16_t poison_code(int64_t index) const {
    constexpr uint16_t kBf16[4] = {0x7fc0, 0x7f80, 0xff80, 0xffc0};
    constexpr uint16_t kF16[4] = {0x7e00, 0x7c00, 0xfc00, 0xfe00};
    constexpr uint16_t kF8[4] = {0x7f, 0xff, 0x7f, 0xff};
    const uint16_t* codes = dtype_ == DType::bf16 ? kBf16 : dtype_ == DType::f16 ? kF16 : kF8;
    return codes[index % 4];
  }

  void store(void* data, int64_t index, uint16_t code) const {
    if (dtype_ == DType::f8_e4m3fn) {
      static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(code);
    } else {
      static_cast<uint16_t*>(data)[index] = code;
    }
  }

  DType dtype_;
  std::vector<uint16_t> codes_;  // [kSums]
};

void check_spec(const SyntheticSpec& spec) {
  const auto at_least = [](const char* what, int64_t value, int64_t least) {
    if (value < least) fail_argument("{}: must be at least {}, is {}", what, least, value);
    if (value > std::numeric_limits<int32_t>::max()) {
      fail_argument("{}: must be at most {}, is {}", what, std::numeric_limits<int32_t>::max(),
                    value);
    }
  };
  at_least("rows", spec.rows, 0);
  at_least("requests", spec.requests, 1);
  at_least("context", spec.context, 1);
  at_least("groups", spec.groups, 1);
  at_least("heads", spec.heads, 1);
  at_least("dim", spec.dim, 1);
  at_least("region_count", spec.region_count, 0);
  at_least("block_size", spec.block_size, 1);
  at_least("sink_regions", spec.sink_regions, 0);
  at_least("local_regions", spec.local_regions, 0);
  if (spec.heads % spec.groups != 0) {
    fail_argument("heads: must be a multiple of groups = {}, is {}", spec.groups, spec.heads);
  }
  if (spec.block_size % kPageTokens != 0) {
    fail_argument("block_size: must be a multiple of {}, is {}", kPageTokens, spec.block_size);
  }
  if (spec.query_dtype != DType::bf16 && spec.query_dtype != DType::f16) {
    fail_argument("query_dtype: must be bf16 or f16, is {}", name(spec.query_dtype));
  }
  if (spec.kv_dtype != DType::bf16 && spec.kv_dtype != DType::f16 &&
      spec.kv_dtype != DType::f8_e4m3fn) {
    fail_argument("kv_dtype: must be bf16, f16 or f8_e4m3fn, is {}", name(spec.kv_dtype));
  }
  if (!(spec.keep >= 0.0 && spec.keep <= 1.0)) {
    fail_argument("keep: must be 0 .. 1, is {}", spec.keep);
  }
  const int64_t most_rows = (spec.rows + spec.requests - 1) / spec.requests;
  if (spec.context < most_rows) {
    fail_argument("context: must hold the {} rows of a request, is {}", most_rows, spec.context);
  }
}

/// Selects regions row after row, for one request and group.
class Selector {
 public:
  Selector(const SyntheticSpec& spec, Random& random)
      : spec_(spec),
        random_(random),
        marks_(static_cast<size_t>(region_of_position(spec.context - 1) + 1), kFree) {}

  /// Writes the selection of the row at `position`, ascending, to `entries` [region_count].
  void select(int64_t position, int32_t* entries) {
    const int64_t own = region_of_position(position);
    const int64_t count = selection_count(position, spec_.region_count);
    std::vector<int32_t> chosen;
    chosen.reserve(static_cast<size_t>(count));
    if (count == own + 1) {
      chosen.resize(static_cast<size_t>(count));
      std::iota(chosen.begin(), chosen.end(), 0);
    } else if (count > 0) {
      for (const int32_t region : before_) mark(region) = kBefore;
      choose_fixed(own, count, chosen);
      const int64_t others = count - static_cast<int64_t>(chosen.size());
      choose_carried(others, chosen);
      choose_new(own, count, chosen);
      for (const int32_t region : before_) mark(region) = kFree;
      for (const int32_t region : chosen) mark(region) = kFree;
      std::sort(chosen.begin(), chosen.end());
    }
    std::copy(chosen.begin(), chosen.end(), entries);
    before_ = std::move(chosen);
  }

 private:
  enum Mark : uint8_t { kFree, kBefore, kChosen };

  Mark& mark(int64_t region) { return marks_[static_cast<size_t>(region)]; }

  void take(int64_t region, std::vector<int32_t>& chosen) {
    mark(region) = kChosen;
    chosen.push_back(static_cast<int32_t>(region));
  }

  /// The own region, then the sink, then the local window, as far as `count` goes.
  void choose_fixed(int64_t own, int64_t count, std::vector<int32_t>& chosen) {
    const auto room = [&] { return static_cast<int64_t>(chosen.size()) < count; };
    take(own, chosen);
    for (int64_t region = 0; region < std::min(spec_.sink_regions, own) && room(); ++region) {
      take(region, chosen);
    }
    for (int64_t region = own - 1;
         region >= std::max<int64_t>(own - spec_.local_regions, 0) && room(); --region) {
      if (mark(region) != kChosen) take(region, chosen);
    }
  }

  /// A random part of what the row before selected: `keep * others` on average.
  void choose_carried(int64_t others, std::vector<int32_t>& chosen) {
    pool_.clear();
    for (const int32_t region : before_) {
      if (mark(region) == kBefore) pool_.push_back(region);
    }
    // In units of 2^-32, rounded up or down at random; whole numbers are the same on every machine.
    const auto keep = static_cast<int64_t>(std::llround(spec_.keep * 0x1p32));
    const int64_t wanted = (keep * others + static_cast<int64_t>(random_.bits() >> 32)) >> 32;
    const int64_t carried = std::min({wanted, others, static_cast<int64_t>(pool_.size())});
    for (int64_t i = 0; i < carried; ++i) take(draw_from_pool(), chosen);
  }

  /// Fills up to `count` with regions that the row before did not select.
  void choose_new(int64_t own, int64_t count, std::vector<int32_t>& chosen) {
    const auto missing = [&] { return count - static_cast<int64_t>(chosen.size()); };
    // pool_ now holds what the row before selected and this one has not taken.
    const int64_t range = own + 1;
    int64_t free = range - static_cast<int64_t>(chosen.size() + pool_.size());
    while (missing() > 0 && free > range / 8) {
      const int64_t region = random_.below(range);
      if (mark(region) != kFree) continue;
      take(region, chosen);
      --free;
    }
    if (missing() == 0) return;
    // Few are left: draw from a list of them, and only then from what the row before selected.
    std::vector<int32_t> rejected = std::move(pool_);
    pool_.clear();
    for (int64_t region = 0; region < range; ++region) {
      if (mark(region) == kFree) pool_.push_back(static_cast<int32_t>(region));
    }
    while (missing() > 0 && !pool_.empty()) take(draw_from_pool(), chosen);
    if (missing() > 0) pool_ = std::move(rejected);
    while (missing() > 0) take(draw_from_pool(), chosen);
  }

  int32_t draw_from_pool() {
    const auto index = static_cast<size_t>(random_.below(static_cast<int64_t>(pool_.size())));
    const int32_t region = pool_[index];
    pool_[index] = pool_.back();
    pool_.pop_back();
    return region;
  }

  const SyntheticSpec& spec_;
  Random& random_;
  std::vector<Mark> marks_;      // [regions of the context]
  std::vector<int32_t> before_;  // what the row before selected, ascending
  std::vector<int32_t> pool_;    // to draw from
};

/// Physical blocks for `live` logical ones: a random part of a cache with a few more.
std::vector<int32_t> scattered_blocks(int64_t blocks, Random& random) {
  std::vector<int32_t> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = blocks - 1; i > 0; --i) {
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(random.below(i + 1))]);
  }
  return order;
}

void fill_table_and_cache(const SyntheticSpec& spec, Step& step) {
  const int64_t request_blocks = (spec.context + spec.block_size - 1) / spec.block_size;
  const int64_t blocks = step.kv_cache.shape[0];
  const int64_t columns = step.block_table.shape[1];
  Random block_random(spec.seed, 1);
  const std::vector<int32_t> order = scattered_blocks(blocks, block_random);

  std::vector<int64_t> written(static_cast<size_t>(blocks), 0);  // tokens of each physical block
  auto* table = static_cast<int32_t*>(step.block_table.data);
  for (int64_t request = 0; request < spec.requests; ++request) {
    for (int64_t column = 0; column < columns; ++column) {
      if (column >= request_blocks) {
        table[request * columns + column] = spec.poison ? -1 : 0;
        continue;
      }
      const int32_t block = order[static_cast<size_t>(request * request_blocks + column)];
      table[request * columns + column] = block;
      written[static_cast<size_t>(block)] =
          std::min(spec.block_size, spec.context - column * spec.block_size);
    }
  }

  Random random(spec.seed, 2);
  const NormalCodes codes(spec.kv_dtype);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t group = 0; group < spec.groups; ++group) {
      const int64_t begin = (block * spec.groups + group) * spec.block_size * 2 * spec.dim;
      const int64_t middle = begin + written[static_cast<size_t>(block)] * 2 * spec.dim;
      codes.fill(step.kv_cache.data, begin, middle, random);
      codes.fill_unwritten(step.kv_cache.data, middle, begin + spec.block_size * 2 * spec.dim,
                           spec.poison);
    }
  }
}

void fill_rows(const SyntheticSpec& spec, Step& step) {
  auto* owners = static_cast<int32_t*>(step.owners.data);
  auto* positions = static_cast<int32_t*>(step.positions.data);
  auto* regions = static_cast<int32_t*>(step.regions.data);
  std::fill_n(regions, step.regions.size(), -1);  // behind the counted entries
  Random random(spec.seed, 3);
  int64_t row = 0;
  for (int64_t request = 0; request < spec.requests; ++request) {
    const int64_t count = spec.rows / spec.requests + (request < spec.rows % spec.requests ? 1 : 0);
    std::vector<Selector> selectors(static_cast<size_t>(spec.groups), Selector(spec, random));
    for (int64_t i = 0; i < count; ++i, ++row) {
      const int64_t position = spec.context - count + i;
      owners[row] = static_cast<int32_t>(request);
      positions[row] = static_cast<int32_t>(position);
      for (int64_t group = 0; group < spec.groups; ++group) {
        selectors[static_cast<size_t>(group)].select(
            position, regions + (row * spec.groups + group) * spec.region_count);
      }
    }
  }
}

}  // namespace

Step make_synthetic_step(const SyntheticSpec& spec) {
  check_spec(spec);
  const int64_t request_blocks = (spec.context + spec.block_size - 1) / spec.block_size;
  const int64_t live = checked_mul(request_blocks, spec.requests, "blocks");
  const int64_t blocks = live + std::max<int64_t>(2, live / 16);
  if (blocks > std::numeric_limits<int32_t>::max()) {
    fail_argument("blocks: must be at most {}, {} requests of {} tokens need {}",
                  std::numeric_limits<int32_t>::max(), spec.requests, spec.context, blocks);
  }

  auto storage = std::make_shared<TensorStorage>();
  Step step;
  step.kv_cache =
      storage->allocate_tensor(spec.kv_dtype, {blocks, spec.groups, spec.block_size, 2 * spec.dim});
  step.query = storage->allocate_tensor(spec.query_dtype, {spec.rows, spec.heads, spec.dim});
  step.block_table = storage->allocate_tensor(DType::i32, {spec.requests, request_blocks + 1});
  step.owners = storage->allocate_tensor(DType::i32, {spec.rows});
  step.positions = storage->allocate_tensor(DType::i32, {spec.rows});
  step.regions = storage->allocate_tensor(DType::i32, {spec.rows, spec.groups, spec.region_count});
  step.lengths = storage->allocate_tensor(DType::i32, {spec.requests});
  step.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.dim)));
  if (spec.kv_dtype == DType::f8_e4m3fn) {
    step.k_scale = 0.37f;
    step.v_scale = 2.25f;
  }

  fill_table_and_cache(spec, step);
  fill_rows(spec, step);
  std::fill_n(static_cast<int32_t*>(step.lengths.data), spec.requests,
              static_cast<int32_t>(spec.context));
  Random random(spec.seed, 4);
  NormalCodes(spec.query_dtype).fill(step.query.data, 0, step.query.size(), random);
  step.storage = std::move(storage);
  return step;
}

}  // namespace octopage
