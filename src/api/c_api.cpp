#include "octopage/octopage.hpp"
