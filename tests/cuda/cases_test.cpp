// Every given case on the device, all three paths, pages and staging plan included.

#include "cuda/device_step.hpp"

namespace octopage::test {

extern std::string cases_directory;

namespace {

template <typename T>
std::vector<T> values(const TensorView& t) {
  const auto* data = static_cast<const T*>(t.data);
  return {data, data + t.size()};
}

Result expected_of(const Step& step) {
  Result expected;
  expected.output = values<float>(step.expected_output);
  expected.lse = values<float>(step.expected_lse);
  return expected;
}

std::vector<std::filesystem::path> case_files() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(cases_directory)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST(Cases, Direct) {
  ASSERT_FALSE(case_files().empty());
  for (const auto& file : case_files()) {
    const Step step = read_step(file);
    for (const DType dtype : {DType::f32, step.query.dtype}) {
      DeviceStep device(step, dtype);
      expect_close(device.direct(), expected_of(step), step, file.stem().string(), dtype);
    }
  }
}

TEST(Cases, Planned) {
  for (const auto& file : case_files()) {
    const Step step = read_step(file);
    DeviceStep device(step);
    std::vector<std::vector<int32_t>> pages;
    expect_close(device.planned(device.args.kv_cache, device.args.block_table, &pages),
                 expected_of(step), step, file.stem().string());
    std::vector<int32_t> all;
    for (const auto& group : pages) all.insert(all.end(), group.begin(), group.end());
    EXPECT_EQ(all, values<int32_t>(step.expected_pages)) << file.stem();
  }
}

TEST(Cases, Staged) {
  for (const auto& file : case_files()) {
    const Step step = read_step(file);
    DeviceStep device(step);
    std::vector<int64_t> lengths;
    for (const int32_t length : values<int32_t>(step.lengths)) lengths.push_back(length);
    const int64_t staged = staged_block_count(lengths, step.block_size());
    const TensorView blocks = device.arena.allocate(DType::i32, {staged});
    const TensorView table =
        device.arena.allocate(DType::i32, {step.requests(), step.block_table.shape[1]});
    plan_staged_prefill_pages(device.args.block_table, lengths, step.block_size(), blocks, table);
    std::vector<int32_t> got(static_cast<size_t>(staged));
    device.arena.download(blocks, got.data());
    EXPECT_EQ(got, values<int32_t>(step.expected_staged_blocks)) << file.stem();
    got.resize(static_cast<size_t>(table.size()));
    device.arena.download(table, got.data());
    EXPECT_EQ(got, values<int32_t>(step.expected_staged_table)) << file.stem();

    // One group after the other through the same staged buffer.
    const DType dtype = step.query.dtype;
    const TensorView cache =
        device.arena.allocate(dtype, {staged, 1, step.block_size(), 2 * step.dim()});
    const int64_t heads = step.heads() / step.groups();
    for (int64_t g = 0; g < step.groups(); ++g) {
      stage_prefill_pages(device.args.kv_cache.slice(1, g, g + 1), blocks, cache,
                          device.args.k_scale, device.args.v_scale);
      SparsePrefillArgs args = device.args;
      args.query = args.query.slice(1, g * heads, (g + 1) * heads);
      args.output = args.output.slice(1, g * heads, (g + 1) * heads);
      args.lse = args.lse.slice(1, g * heads, (g + 1) * heads);
      if (args.regions.rank == 3) args.regions = args.regions.slice(1, g, g + 1);
      args.kv_cache = cache;
      args.block_table = table;
      sparse_prefill(args, device.options_for(args));
      // From f8 the staged values are rounded once more, so the bound holds for what was staged.
      std::vector<uint16_t> bytes(static_cast<size_t>(cache.size() + 8));
      void* aligned = bytes.data();
      size_t space = bytes.size() * 2;
      std::align(16, static_cast<size_t>(cache.size()) * 2, aligned, space);
      device.arena.download(cache, aligned);
      Step staged_step = step;
      staged_step.kv_cache =
          TensorView::contiguous(aligned, dtype, {staged, 1, step.block_size(), 2 * step.dim()});
      staged_step.block_table = step.expected_staged_table;
      staged_step.query = step.query.slice(1, g * heads, (g + 1) * heads);
      if (step.regions.rank == 3) staged_step.regions = step.regions.slice(1, g, g + 1);
      const Result expected = reference(staged_step);
      const Result actual = device.fetch_heads(g * heads, (g + 1) * heads);
      expect_close(actual, expected, staged_step, file.stem().string() + " staged");
    }
  }
}

}  // namespace
}  // namespace octopage::test
