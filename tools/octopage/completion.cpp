// octopage completion: prints a completion script for a shell.

#include <fmt/format.h>

#include <memory>
#include <string>

#include "tools/octopage/output.hpp"
#include "tools/octopage/report.hpp"
#include "tools/octopage/verbs.hpp"

namespace octopage::cli {
namespace {

constexpr const char* kBash = R"(# octopage completion for bash
_octopage() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} verb=${COMP_WORDS[1]}
  local words=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "attend make-step info inspect bench backends completion --help --version" -- "$current"))
    return
  fi
  case $previous in
    --card) words="nvidia-h200" ;;
    --path) words="direct planned staged" ;;
    --output-type) words="query f32" ;;
    --query-dtype) words="bf16 f16" ;;
    --kv-dtype) words="bf16 f16 f8_e4m3fn" ;;
    --backend) words=$(octopage backends 2>/dev/null | tail -n +2 | cut -d ' ' -f 1) ;;
    -o|--output|--png) COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    return
  fi
  case $verb in
    attend) words="-o --output --backend --path --threads --check --strict --tolerance --output-type
      --batch-invariant --json --help" ;;
    make-step) words="--rows --requests --context --groups --heads --dim --regions --block-size
      --query-dtype --kv-dtype --keep --sink --local --seed --no-poison --with-expected --json --help" ;;
    inspect) words="-o --output --png --json --group --card --matrix-tflops --gather-tbps --memory-tbps --help" ;;
    bench) words="compare --scenario --list --backend --path --threads --calls --rows --context --regions
      -o --output --json --help" ;;
    info|backends) words="--json --help" ;;
    completion) words="bash --json --help" ;;
  esac
  case $current in
    -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
    *) if [ "$verb" = completion ]; then COMPREPLY=($(compgen -W "bash" -- "$current"))
       elif [ "$verb" = bench ] && [ "$COMP_CWORD" -eq 2 ]; then COMPREPLY=($(compgen -W "compare" -- "$current"))
       else COMPREPLY=($(compgen -f -- "$current")); fi ;;
  esac
}
complete -o filenames -F _octopage octopage
)";

}  // namespace

void add_completion(CLI::App& app, Action& action) {
  struct Args {
    std::string shell;
    bool json = false;
  };
  auto args = std::make_shared<Args>();
  CLI::App* verb = app.add_subcommand("completion", "Print a completion script for a shell");
  verb->add_option("SHELL", args->shell, "The shell: bash")
      ->required()
      ->check(CLI::IsMember({"bash"}));
  verb->add_flag("--json", args->json, "Print one JSON object");
  verb->footer(
      "Examples:\n"
      "  source <(octopage completion bash)\n"
      "  octopage completion bash > ~/.local/share/bash-completion/completions/octopage");
  verb->callback([args, &action] {
    action = [args] {
      if (args->json) {
        print_json({{"shell", args->shell}, {"script", kBash}});
      } else {
        print_out("{}", kBash);
      }
      return kOk;
    };
  });
}

}  // namespace octopage::cli
