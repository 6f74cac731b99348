/* Version of octopage. The build system and every binding read it from here. */
#ifndef OCTOPAGE_VERSION_H_
#define OCTOPAGE_VERSION_H_

#define OCTOPAGE_VERSION_MAJOR 0
#define OCTOPAGE_VERSION_MINOR 1
#define OCTOPAGE_VERSION_PATCH 0
#define OCTOPAGE_VERSION_STRING "0.1.0"

#endif /* OCTOPAGE_VERSION_H_ */
