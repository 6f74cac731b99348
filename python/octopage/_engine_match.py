"""Does a module of an engine have the names, signatures and fields that octopage replaces (vLLM 0.34's)?"""

import dis
import inspect
import types

from . import step5

FUNCTIONS = ("compact_page_metadata", "fill_prefill_pages", "kv_page_stride", "plan_staged_prefill_pages",
             "stage_prefill_pages", "view_sparse_kv_pages")
RECORDS = {"PagedPrefillMetadata": ("owners", "block_table", "indices", "indptr", "block_size", "page_stride"),
           "StagedPrefillPages": ("pages", "table")}
PLAN = "CompactPagedPrefill"
PLAN_METHODS = ("plan", "fixup_positions", "page_metadata", "prepare_chunk", "finish")
PLAN_ATTRIBUTES = ("pages", "indptr", "query_buffer", "query_shape", "region_count", "block_size")


def differences(module):
    """What keeps octopage from replacing `module`, in sentences; empty where nothing does."""
    names = vars(module)
    missing = [name for name in (PLAN, *RECORDS, *FUNCTIONS) if name not in names]
    if missing:
        return [f"it has no {', '.join(missing)}"]
    found = []
    for name in FUNCTIONS:
        found += _signature_differences(name, names[name], getattr(step5, name))
    for name, expected in RECORDS.items():
        fields = record_fields(names[name])
        if fields != expected:
            found.append(f"{name} has the fields {fields}, octopage expects {expected}" if fields is not None else
                         f"{name} is no NamedTuple")
    return found + _plan_differences(names[PLAN])


def record_fields(kind):
    """The fields of a NamedTuple; None for anything else."""
    return tuple(kind._fields) if isinstance(kind, type) and hasattr(kind, "_fields") else None


def _signature_differences(name, theirs, ours):
    """A call that `theirs` accepts must mean the same to `ours`. Keyword-only arguments that only `ours` has
    are octopage's own."""
    if not callable(theirs) or isinstance(theirs, type):
        return [f"{name} is no function"]
    try:
        signature = inspect.signature(theirs)
    except (TypeError, ValueError):
        return [f"{name} has no signature that can be read"]
    accepted = inspect.signature(ours)
    if _accepts(accepted, signature):
        return []
    return [f"{name} is {name}{_plain(signature)}, octopage expects {name}{_plain(accepted)}"]


def _accepts(ours, theirs):
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    mine = [p for p in ours.parameters.values() if p.kind is not keyword_only]
    other = [p for p in theirs.parameters.values() if p.kind is not keyword_only]
    if [(p.name, p.kind) for p in mine] != [(p.name, p.kind) for p in other]:
        return False
    pairs = list(zip(mine, other))
    for parameter in theirs.parameters.values():
        if parameter.kind is keyword_only:
            match = ours.parameters.get(parameter.name)
            if match is None or match.kind is not keyword_only:
                return False
            pairs.append((match, parameter))
    return all(_default_serves(mine.default, other.default) for mine, other in pairs)


def _default_serves(mine, other):
    empty = inspect.Parameter.empty
    return other is empty or (mine is not empty and type(mine) is type(other) and mine == other)


def _plain(signature):
    """The signature without annotations, which do not matter here."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(parameters))


def _plan_differences(theirs):
    if not isinstance(theirs, type):
        return [f"{PLAN} is no class"]
    found = []
    for method in ("__init__", *PLAN_METHODS):
        function = inspect.getattr_static(theirs, method, None)
        if function is None:
            found.append(f"{PLAN} has no method {method}")
        else:
            found += _signature_differences(f"{PLAN}.{method}", function,
                                            getattr(step5.CompactPagedPrefill, method))
    stored = _attributes(theirs)
    absent = [name for name in PLAN_ATTRIBUTES if name not in stored]
    if absent:
        found.append(f"{PLAN} neither declares nor assigns {', '.join(absent)}")
    more = sorted(name for name in dir(theirs)
                  if not name.startswith("_") and not hasattr(step5.CompactPagedPrefill, name)
                  and (callable(getattr(theirs, name)) or isinstance(getattr(theirs, name), property)))
    if more:
        found.append(f"{PLAN} has {', '.join(more)}, which octopage does not know")
    return found


def _attributes(kind):
    """Names that a class declares, or assigns to an object in one of its methods."""
    names = set(dir(kind))
    for base in kind.__mro__:
        names.update(vars(base).get("__annotations__", ()))  # asking the class for them would add them to it
        for member in vars(base).values():
            member = inspect.unwrap(member) if callable(member) else member
            if isinstance(member, types.FunctionType):
                names.update(i.argval for i in dis.get_instructions(member) if i.opname == "STORE_ATTR")
    return names
