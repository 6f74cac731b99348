#ifndef OCTOPAGE_CORE_READ_ONCE_HPP_
#define OCTOPAGE_CORE_READ_ONCE_HPP_

// Integers of the caller's from which addresses are made: ids, owners, positions, table entries,
// ranges, lengths. Another thread may write to them while a call on the CPU runs. So each is read
// into a local, checked there, and used from there: what was checked is what is used.
//
// A plain read does not say that: a compiler may read memory again instead of keeping a register.
// A relaxed atomic read is one machine read, and costs what a plain one does.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace octopage {

/// `*from`, read exactly once. Aligned, as all tensors are (`check_tensor`).
template <typename T>
inline T read_once(const T* from) {
  static_assert(std::atomic_ref<T>::is_always_lock_free);
  // Only loads: the memory may be read-only.
  return std::atomic_ref<T>(*const_cast<T*>(from)).load(std::memory_order_relaxed);
}

/// A copy that nobody else writes to, each element read once.
template <typename T>
std::vector<T> copy_once(std::span<const T> from) {
  std::vector<T> copy(from.size());
  for (size_t i = 0; i < from.size(); ++i) copy[i] = read_once(&from[i]);
  return copy;
}

}  // namespace octopage

#endif  // OCTOPAGE_CORE_READ_ONCE_HPP_
