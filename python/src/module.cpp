// octopage._core: the C++ API as Python sees it. Tensors come as descriptions of memory that
// somebody else owns (octopage/_tensor.py makes them); the functions of the package keep the owners
// alive.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "dlpack.hpp"
#include "octopage/octopage.hpp"
#include "octopage/version.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octopage {
namespace {

constexpr DType kDTypes[] = {DType::bf16, DType::f16, DType::f32, DType::f8_e4m3fn,
                             DType::u8,   DType::i32, DType::i64};

DType dtype_by_name(const std::string& wanted) {
  for (const DType dtype : kDTypes) {
    if (wanted == name(dtype)) return dtype;
  }
  throw Error(ErrorCode::invalid_argument, "dtype = '" + wanted + "': no dtype has this name");
}

TensorView make_tensor(uintptr_t pointer, const std::string& dtype, std::vector<int64_t> shape,
                       std::vector<int64_t> strides, bool on_cuda, int32_t index) {
  TensorView view;
  if (shape.empty() || shape.size() > kMaxRank || shape.size() != strides.size()) {
    throw Error(ErrorCode::invalid_argument,
                "a tensor of rank " + std::to_string(shape.size()) + ": must be 1 .. 4");
  }
  view.data = reinterpret_cast<void*>(pointer);
  view.dtype = dtype_by_name(dtype);
  view.device = {on_cuda ? DeviceType::cuda : DeviceType::cpu, index};
  view.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  if (view.size() == 0) {  // frameworks say anything about strides of nothing
    int64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0; stride *= std::max<int64_t>(shape[d], 1))
      view.strides[d] = stride;
  }
  return view;
}

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  const auto of = [](nb::dlpack::dtype_code code, uint8_t bits) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), bits, 1};
  };
  switch (dtype) {
    case DType::bf16:
      return of(nb::dlpack::dtype_code::Bfloat, 16);
    case DType::f16:
      return of(nb::dlpack::dtype_code::Float, 16);
    case DType::f32:
      return of(nb::dlpack::dtype_code::Float, 32);
    case DType::i32:
      return of(nb::dlpack::dtype_code::Int, 32);
    case DType::i64:
      return of(nb::dlpack::dtype_code::Int, 64);
    default:
      return of(nb::dlpack::dtype_code::UInt, 8);
  }
}

template <typename... Framework>
nb::ndarray<Framework...> export_as(const TensorView& view, nb::handle owner,
                                    nb::dlpack::dtype dtype) {
  const std::vector<size_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
  return nb::ndarray<Framework...>(
      view.data, shape.size(), shape.data(), owner, view.strides.data(), dtype,
      view.device.type == DeviceType::cuda ? nb::device::cuda::value : nb::device::cpu::value,
      view.device.index);
}

/// Memory of `owner` as a DLPack capsule.
nb::ndarray<> export_dlpack(const TensorView& view, nb::object owner) {
  return export_as<>(view, owner, dlpack_dtype(view.dtype));
}

/// The same as an array of numpy, which knows no bf16: its bits as u16.
template <typename... Access>
nb::ndarray<nb::numpy, Access...> export_numpy(const TensorView& view, nb::object owner) {
  const nb::dlpack::dtype bits = {static_cast<uint8_t>(nb::dlpack::dtype_code::UInt), 16, 1};
  return export_as<nb::numpy, Access...>(
      view, owner, view.dtype == DType::bf16 ? bits : dlpack_dtype(view.dtype));
}

/// A vector as an array of numpy that owns it.
template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> as_array(std::vector<T> values) {
  auto* held = new std::vector<T>(std::move(values));
  const nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(held->data(), {held->size()}, owner);
}

/// Options with the memory of their strings.
struct PyOptions {
  std::string backend;
  bool strict = false;
  bool batch_invariant = false;
  uintptr_t status = 0;
  int32_t threads = 0;
  uintptr_t stream = 0;
  uintptr_t workspace = 0;
  size_t workspace_bytes = 0;

  operator Options() const {
    Options options;
    options.backend = backend;
    options.strict = strict;
    options.batch_invariant = batch_invariant;
    options.status = reinterpret_cast<int32_t*>(status);
    options.threads = threads;
    options.stream = reinterpret_cast<void*>(stream);
    options.workspace = reinterpret_cast<void*>(workspace);
    options.workspace_bytes = workspace_bytes;
    return options;
  }
};

using MaybeTensor = std::optional<TensorView>;
using HostIntegers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const int64_t> span_of(const HostIntegers& integers) {
  return {integers.data(), integers.size()};
}

TensorView or_absent(const MaybeTensor& tensor) {
  return tensor.value_or(TensorView{});
}

/// None, a number, or a tensor of one f32.
Scale scale_of(const char* argument, nb::handle scale) {
  if (scale.is_none()) return {};
  if (nb::isinstance<TensorView>(scale)) {
    const TensorView view = nb::cast<TensorView>(scale);
    if (view.dtype != DType::f32 || view.size() != 1) {
      throw Error(ErrorCode::invalid_argument,
                  std::string(argument) + ": a tensor must hold one f32, holds " +
                      std::to_string(view.size()) + " of " + name(view.dtype));
    }
    return Scale::at(static_cast<const float*>(view.data));
  }
  return Scale::of(nb::cast<float>(scale));
}

SparsePrefillArgs make_args(const TensorView& query, const TensorView& kv_cache,
                            const TensorView& block_table, const TensorView& owners,
                            const TensorView& positions, const TensorView& regions,
                            const TensorView& output, const MaybeTensor& lse, float scale,
                            nb::object k_scale, nb::object v_scale) {
  SparsePrefillArgs args;
  args.query = query;
  args.kv_cache = kv_cache;
  args.block_table = block_table;
  args.owners = owners;
  args.positions = positions;
  args.regions = regions;
  args.output = output;
  args.lse = or_absent(lse);
  args.scale = scale;
  args.k_scale = scale_of("k_scale", k_scale);
  args.v_scale = scale_of("v_scale", v_scale);
  return args;
}

/// An argument that the library and a Python function call by different names.
struct Name {
  std::string_view library;
  std::string_view python;
};
using Names = std::span<const Name>;
constexpr Name kDirectNames[] = {{"output", "out"}};
constexpr Name kStep5Names[] = {{"kv_cache", "cache"}, {"block_table", "table"}, {"output", "out"}};
constexpr Name kStagingNames[] = {{"kv_cache", "cache"}, {"staged_blocks", "staged"}};

/// A message of the library in the names of a Python function: whole words are replaced, and the
/// members of `options`, which are parameters in Python, stand alone. What stands in quotes is a
/// value of the caller's.
std::string renamed(std::string_view message, Names names) {
  const auto in_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  };
  std::string text;
  for (size_t at = 0; at < message.size();) {
    size_t end = at;
    while (end < message.size() && in_word(message[end])) ++end;
    const std::string_view word = message.substr(at, end - at);
    if (message[at] == '\'') {  // an apostrophe follows a letter, and is part of no word here
      const bool apostrophe = at > 0 && in_word(message[at - 1]);
      const size_t close =
          apostrophe ? at : std::min(message.find('\'', at + 1), message.size() - 1);
      text += message.substr(at, close + 1 - at);
      at = close + 1;
    } else if (word.empty()) {
      text += message[at++];
    } else if (word == "options" && message.substr(end, 1) == ".") {
      at = end + 1;
    } else {
      const auto name = std::find_if(names.begin(), names.end(),
                                     [&](const Name& n) { return n.library == word; });
      text += name == names.end() ? word : name->python;
      at = end;
    }
  }
  return text;
}

/// Runs a call of the library whose errors name arguments as Python does.
template <typename Call>
auto in_names(Names names, Call&& call) {
  try {
    return call();
  } catch (const Error& error) {
    throw Error(error.code(), renamed(error.what(), names));
  }
}

/// The same without the GIL.
template <typename Call>
auto without_gil(Names names, Call&& call) {
  const nb::gil_scoped_release release;
  return in_names(names, call);
}

void set_python_error(ErrorCode code, const char* message) {
  const nb::object classes = nb::module_::import_("octopage._errors").attr("BY_CODE");
  const nb::object kind = classes[nb::int_(static_cast<int>(code))];
  // Names that a user gave may be of any bytes.
  const auto text = nb::steal<nb::object>(
      PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)), "replace"));
  if (text.is_valid()) PyErr_SetObject(kind.ptr(), text.ptr());
}

void translate(const std::exception_ptr& error, void*) {
  constexpr const char* kNoMemory = "the call needs more memory than can be allocated";
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    set_python_error(e.code(), e.what());
  } catch (const std::bad_alloc&) {
    set_python_error(ErrorCode::out_of_memory, kNoMemory);
  } catch (const std::length_error&) {  // a vector of more elements than there can be
    set_python_error(ErrorCode::out_of_memory, kNoMemory);
  }
}

std::vector<int64_t> shape_of(const TensorView& view) {
  return {view.shape.begin(), view.shape.begin() + view.rank};
}
std::vector<int64_t> strides_of(const TensorView& view) {
  return {view.strides.begin(), view.strides.begin() + view.rank};
}

}  // namespace
}  // namespace octopage

NB_MODULE(_core, m) {
  using namespace octopage;
  nb::register_exception_translator(translate);
  m.attr("__version__") = OCTOPAGE_VERSION_STRING;

  nb::class_<TensorView>(m, "Tensor", "A strided array that somebody else owns.")
      .def_prop_ro("shape", &shape_of)
      .def_prop_ro("strides", &strides_of, "In elements.")
      .def_prop_ro("dtype", [](const TensorView& view) { return name(view.dtype); })
      .def_prop_ro("pointer",
                   [](const TensorView& view) { return reinterpret_cast<uintptr_t>(view.data); })
      .def_prop_ro("on_cuda",
                   [](const TensorView& view) { return view.device.type == DeviceType::cuda; })
      .def_prop_ro("device_index", [](const TensorView& view) { return view.device.index; })
      .def_prop_ro("present", &TensorView::present)
      .def_prop_ro("is_contiguous", &TensorView::is_contiguous)
      .def_prop_ro("bytes",
                   [](const TensorView& view) { return view.size() * itemsize(view.dtype); });
  m.def("tensor", &make_tensor, "pointer"_a, "dtype"_a, "shape"_a, "strides"_a, "on_cuda"_a,
        "device_index"_a);
  nb::class_<dlpack::Imported>(m, "Imported")
      .def_prop_ro("view", [](const dlpack::Imported& imported) { return imported.view; })
      .def_ro("rank", &dlpack::Imported::rank)
      .def_ro("read_only", &dlpack::Imported::read_only);
  m.def("import_dlpack", [](nb::handle capsule) { return dlpack::import(capsule.ptr()); });
  m.def("export_dlpack", &export_dlpack, "view"_a, "owner"_a, nb::rv_policy::reference);
  m.def("export_numpy", &export_numpy<>, "view"_a, "owner"_a, nb::rv_policy::reference);
  m.def("export_numpy_read_only", &export_numpy<nb::ro>, "view"_a, "owner"_a,
        nb::rv_policy::reference);

  nb::class_<PyOptions>(m, "Options")
      .def(nb::init<>())
      .def_rw("backend", &PyOptions::backend)
      .def_rw("strict", &PyOptions::strict)
      .def_rw("batch_invariant", &PyOptions::batch_invariant)
      .def_rw("status", &PyOptions::status)
      .def_rw("threads", &PyOptions::threads)
      .def_rw("stream", &PyOptions::stream)
      .def_rw("workspace", &PyOptions::workspace)
      .def_rw("workspace_bytes", &PyOptions::workspace_bytes);

  nb::class_<SparsePrefillArgs>(m, "SparsePrefillArgs")
      .def(
          "__init__",
          [](SparsePrefillArgs* self, const TensorView& query, const TensorView& kv_cache,
             const TensorView& block_table, const TensorView& owners, const TensorView& positions,
             const TensorView& regions, const TensorView& output, const MaybeTensor& lse,
             float scale, nb::object k_scale, nb::object v_scale) {
            new (self) SparsePrefillArgs(make_args(query, kv_cache, block_table, owners, positions,
                                                   regions, output, lse, scale, k_scale, v_scale));
          },
          "query"_a, "kv_cache"_a, "block_table"_a, "owners"_a, "positions"_a, "regions"_a,
          "output"_a, "lse"_a.none(), "scale"_a, "k_scale"_a.none(), "v_scale"_a.none());
  m.def("sparse_prefill", [](const SparsePrefillArgs& args, const PyOptions& options) {
    without_gil(kDirectNames, [&] { sparse_prefill(args, options); });
  });
  m.def(
      "sparse_prefill_workspace_size", [](const SparsePrefillArgs& args, const PyOptions& options) {
        return in_names(kDirectNames, [&] { return sparse_prefill_workspace_size(args, options); });
      });
  m.def("choose_backend", [](const SparsePrefillArgs& args, const PyOptions& options) {
    return in_names(kDirectNames, [&] { return choose_backend(args, options); });
  });
  m.def("backend_supports",
        [](const std::string& backend, const SparsePrefillArgs& args, const PyOptions& options) {
          const Support support =
              in_names(kDirectNames, [&] { return backend_supports(backend, args, options); });
          return std::make_pair(support.ok, support.reason);
        });
  m.def("backends", [] {
    nb::list all;
    for (const BackendInfo& info : backends()) {
      nb::dict entry;
      entry["name"] = info.name;
      entry["description"] = info.description;
      entry["device"] = info.device == DeviceType::cuda ? "cuda" : "cpu";
      entry["priority"] = info.priority;
      entry["available"] = info.available;
      entry["reason"] = info.reason;
      all.append(entry);
    }
    return all;
  });
  m.def("rows_from_query_start_loc", [](const std::vector<int32_t>& query_start_loc,
                                        const std::vector<int32_t>& seq_lens) {
    Rows rows =
        without_gil(Names{}, [&] { return rows_from_query_start_loc(query_start_loc, seq_lens); });
    return nb::make_tuple(as_array(std::move(rows.owners)), as_array(std::move(rows.positions)));
  });

  m.def("kv_page_stride", [](const TensorView& kv_cache) {
    return in_names(kStep5Names, [&] { return kv_page_stride(kv_cache); });
  });
  m.def("view_sparse_kv_pages", [](const TensorView& kv_cache) {
    const SparseKvPages pages =
        in_names(kStep5Names, [&] { return view_sparse_kv_pages(kv_cache); });
    return std::make_pair(pages.k, pages.v);
  });
  m.def("compact_page_metadata", [](const HostIntegers& positions, int64_t region_count) {
    CompactPageMetadata metadata = compact_page_metadata(span_of(positions), region_count);
    return nb::make_tuple(as_array(std::move(metadata.indptr)),
                          as_array(std::move(metadata.last_page_len)));
  });
  m.def("staged_block_count", [](const HostIntegers& lengths, int64_t block_size) {
    return staged_block_count(span_of(lengths), block_size);
  });
  m.def("plan_staged_prefill_pages", [](const TensorView& block_table, const HostIntegers& lengths,
                                        int64_t block_size, const TensorView& blocks,
                                        const TensorView& table, const PyOptions& options) {
    without_gil(kStep5Names, [&] {
      plan_staged_prefill_pages(block_table, span_of(lengths), block_size, blocks, table, options);
    });
  });
  m.def(
      "stage_prefill_pages",
      [](const TensorView& kv_cache, const TensorView& blocks, const TensorView& output,
         nb::object k_scale, nb::object v_scale, const PyOptions& options) {
        const Scale k = scale_of("k_scale", k_scale), v = scale_of("v_scale", v_scale);
        without_gil(kStagingNames,
                    [&] { stage_prefill_pages(kv_cache, blocks, output, k, v, options); });
      },
      "kv_cache"_a, "blocks"_a, "output"_a, "k_scale"_a.none(), "v_scale"_a.none(), "options"_a);
  m.def(
      "fill_prefill_pages",
      [](const TensorView& regions, const TensorView& block_table, const TensorView& owners,
         const TensorView& indptr, const TensorView& pages, int64_t block_size, int64_t page_stride,
         int64_t blocks, const MaybeTensor& positions, const MaybeTensor& query,
         const MaybeTensor& contiguous_query, const PyOptions& options) {
        const FillPrefillPagesArgs args = {.regions = regions,
                                           .block_table = block_table,
                                           .owners = owners,
                                           .indptr = indptr,
                                           .pages = pages,
                                           .block_size = block_size,
                                           .page_stride = page_stride,
                                           .blocks = blocks,
                                           .positions = or_absent(positions),
                                           .query = or_absent(query),
                                           .contiguous_query = or_absent(contiguous_query)};
        without_gil(kStep5Names, [&] { fill_prefill_pages(args, options); });
      },
      "regions"_a, "block_table"_a, "owners"_a, "indptr"_a, "pages"_a, "block_size"_a,
      "page_stride"_a, "blocks"_a, "positions"_a.none(), "query"_a.none(),
      "contiguous_query"_a.none(), "options"_a);

  using Plan = CompactPagedPrefill;
  nb::class_<Plan>(m, "CompactPagedPrefill")
      .def(
          "__init__",
          [](Plan* self, const MaybeTensor& workspace) { new (self) Plan(or_absent(workspace)); },
          "workspace"_a.none() = nb::none())
      .def(
          "plan",
          [](Plan& self, std::array<int64_t, 3> query_shape, const std::string& dtype, bool on_cuda,
             int32_t device_index, const HostIntegers& positions, int64_t region_count, float scale,
             int64_t block_size, bool contiguous_query, const PyOptions& options) {
            const PrefillPlanArgs args = {
                .query_shape = query_shape,
                .dtype = dtype_by_name(dtype),
                .device = {on_cuda ? DeviceType::cuda : DeviceType::cpu, device_index},
                .positions = span_of(positions),
                .region_count = region_count,
                .scale = scale,
                .block_size = block_size,
                .contiguous_query = contiguous_query};
            without_gil(kStep5Names, [&] { self.plan(args, options); });
          })
      .def("fixup_positions",
           [](Plan& self, const TensorView& positions, const PyOptions& options) {
             without_gil(kStep5Names, [&] { self.fixup_positions(positions, options); });
           })
      .def("page_metadata",
           [](const Plan& self, const TensorView& block_table, const TensorView& owners,
              int64_t page_stride, int64_t start, int64_t end) -> nb::object {
             const auto metadata = in_names(kStep5Names, [&] {
               return self.page_metadata(block_table, owners, page_stride, start, end);
             });
             if (!metadata) return nb::none();
             return nb::make_tuple(metadata->owners, metadata->pages, metadata->indptr,
                                   metadata->positions, metadata->block_size,
                                   metadata->page_stride);
           })
      .def("prepare_chunk",
           [](Plan& self, int64_t start, const TensorView& query, const TensorView& kv_cache,
              const TensorView& regions, const TensorView& block_table, const TensorView& owners,
              const PyOptions& options) {
             without_gil(kStep5Names, [&] {
               self.prepare_chunk(start, query, kv_cache, regions, block_table, owners, options);
             });
           })
      .def(
          "finish",
          [](Plan& self, const MaybeTensor& query, const TensorView& kv_cache,
             const TensorView& output, const MaybeTensor& lse, nb::object k_scale,
             nb::object v_scale, const PyOptions& options) {
            const Scale k = scale_of("k_scale", k_scale), v = scale_of("v_scale", v_scale);
            without_gil(kStep5Names, [&] {
              self.finish(or_absent(query), kv_cache, output, or_absent(lse), k, v, options);
            });
          },
          "query"_a.none(), "kv_cache"_a, "output"_a, "lse"_a.none(), "k_scale"_a.none(),
          "v_scale"_a.none(), "options"_a)
      .def_prop_ro("planned", &Plan::planned)
      .def_prop_ro("pages", &Plan::pages)
      .def_prop_ro("indptr", &Plan::indptr)
      .def_prop_ro("last_page_len", &Plan::last_page_len)
      .def_prop_ro("positions", &Plan::positions)
      .def_prop_ro("query_buffer", &Plan::query_buffer)
      .def_prop_ro("query_shape", &Plan::query_shape)
      .def_prop_ro("region_count", &Plan::region_count)
      .def_prop_ro("block_size", &Plan::block_size);
}
