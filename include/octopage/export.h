/* Symbol visibility, and the host/device marker. Only OCTOPAGE_API symbols leave the library. */
#ifndef OCTOPAGE_EXPORT_H_
#define OCTOPAGE_EXPORT_H_

#if defined(__GNUC__) || defined(__clang__)
#define OCTOPAGE_API __attribute__((visibility("default")))
#else
#define OCTOPAGE_API
#endif

#if defined(__CUDACC__)
#define OCTOPAGE_HOST_DEVICE __host__ __device__
#else
#define OCTOPAGE_HOST_DEVICE
#endif

#endif /* OCTOPAGE_EXPORT_H_ */
