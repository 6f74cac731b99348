#ifndef OCTOPAGE_TOOLS_INSPECT_PAGE_HPP_
#define OCTOPAGE_TOOLS_INSPECT_PAGE_HPP_

// The report page of `octopage inspect`, from tools/octopage/inspect_page/.

#include <string>
#include <string_view>

#include "inspect/inspection.hpp"
#include "step/step_file.hpp"
#include "tools/octopage/report.hpp"

namespace octopage::cli {

extern const std::string_view kPageHTML;  ///< with @STYLE@, @SCRIPT@ and @DATA@, each once
extern const std::string_view kPageCSS;
extern const std::string_view kPageJS;

/// The numbers of a report: everything but the map's bins.
Json inspection_json(const std::string& path, const Step& step, const Inspection& inspection);

/// The whole page.
std::string inspection_page(const Json& numbers, const Inspection& inspection);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_INSPECT_PAGE_HPP_
