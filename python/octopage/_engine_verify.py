"""Runs an engine's page functions and octopage's on the same inputs, and compares.

octopage runs first and writes into memory of its own, so both see the same inputs even where an output overlaps
one; the engine's result is what the caller gets. Everything is compared on the host, which synchronises. Where the
stream is being captured nothing can be compared: the engine's function then runs alone.
"""

import functools
import inspect
import sys
import threading

import numpy

from . import _core, _tensor
from ._engine_adapter import adapted
from ._engine_match import FUNCTIONS, PLAN_METHODS
from ._errors import OctopageError

# ||difference|| / ||the engine's|| of a head: twice the bound of docs/numerics.md, since both may be off by it.
OUTPUT_BOUND_BF16, OUTPUT_BOUND = 8e-3, 2e-3
# A staged value is rounded once here and perhaps twice there: (relative, absolute) size of the last place.
STAGED_BOUNDS = {"bf16": (2.0**-7, 0), "f16": (2.0**-10, 2.0**-24)}


class VerificationError(OctopageError, RuntimeError):
    """octopage and the engine's own module give different results for one call."""


class Verifier:
    """Wrappers of the functions of `module` and of the methods of its plan class.

    `note(text, key)` logs a warning once per key, `fail(text)` logs an error.
    """

    def __init__(self, module, note, fail):
        names = vars(module)
        self._note, self._fail = note, fail
        self.ours = adapted(module)
        self._inside = threading.local()
        self._lock = threading.Lock()
        self.compared = {}  # calls by name
        self.functions = {name: self._function(name, names[name]) for name in FUNCTIONS}
        plan = names["CompactPagedPrefill"]
        self.methods = {name: self._method(name, getattr(plan, name)) for name in PLAN_METHODS}

    def _function(self, name, theirs):
        shadow, ours = getattr(_Shadow, name), self.ours[name]

        @functools.wraps(theirs)
        def verified(*args, **kwargs):
            if self._within_engine() or self._capturing(name):
                return theirs(*args, **kwargs)
            return self._both(name, lambda call: shadow(call, ours, theirs, args, kwargs))

        return verified

    def _method(self, name, theirs):
        shadow = getattr(_PlanShadow, name)

        @functools.wraps(theirs)
        def verified(plan, *args, **kwargs):
            if self._within_engine():
                return theirs(plan, *args, **kwargs)
            kept = vars(plan).pop(_PlanShadow.KEY, None)  # only a call that octopage saw keeps it
            if self._capturing(name):
                if kept is not None:  # its memory must not be freed now: that would end the capture
                    vars(plan)[_PlanShadow.RESTING] = kept
                return theirs(plan, *args, **kwargs)
            if name == "plan":
                kept = kept or vars(plan).pop(_PlanShadow.RESTING, None)
                kept = kept or _PlanShadow(self.ours["CompactPagedPrefill"]())
            if kept is None:
                self._note(f"{name} is not compared: octopage missed a call since the plan", f"missed {name}")
                return theirs(plan, *args, **kwargs)
            result = self._both(name, lambda call: shadow(kept, call, plan, theirs, args, kwargs))
            vars(plan)[_PlanShadow.KEY] = kept
            return result

        return verified

    def _within_engine(self):
        """Whether the engine's code calls another of its functions: that is part of its run."""
        return getattr(self._inside, "engine", False)

    def _capturing(self, name):
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
            return False
        self._note(f"{name} is not compared while the stream is being captured", f"capture {name}")
        return True

    def _both(self, name, run):
        call = _Comparison(name, self)
        result = run(call)
        with self._lock:
            self.compared[name] = self.compared.get(name, 0) + 1
        return result

    def run_engine(self, theirs, args, kwargs):
        self._inside.engine = True
        try:
            return theirs(*args, **kwargs)
        finally:
            self._inside.engine = False

    def note(self, text, key):
        self._note(text, key)

    def fail(self, text, cause=None):
        self._fail(text)
        raise VerificationError(text) from cause


class _Comparison:
    """One call: octopage's run, the engine's run, and what is said where they differ."""

    def __init__(self, name, verifier):
        self.name, self._verifier = name, verifier

    def both(self, ours, theirs, args, kwargs):
        """(octopage's result, the engine's). An error of the engine's is the caller's, an error of octopage's
        alone is a difference."""
        error = mine = None
        try:
            mine = ours()
        except Exception as raised:  # judged once the engine has run, too
            error = raised
        result = self._verifier.run_engine(theirs, args, kwargs)
        if error is not None:
            self._verifier.fail(f"{self.name}: octopage raises {type(error).__name__}: {error}; the engine's does not",
                                error)
        return mine, result

    def differ(self, what):
        self._verifier.fail(f"{self.name}: {what}")

    def note(self, text, key):
        self._verifier.note(f"{self.name}: {text}", f"{key} {self.name}")

    def same(self, what, mine, theirs):
        if mine != theirs:
            self.differ(f"{what}: octopage has {mine}, the engine {theirs}")

    def same_integers(self, what, mine, theirs):
        mine, theirs = _host(mine), _host(theirs)
        if mine.shape != theirs.shape:
            self.differ(f"{what}: octopage has shape {mine.shape}, the engine {theirs.shape}")
        wrong = numpy.argwhere(mine != theirs)
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            self.differ(f"{what}[{', '.join(map(str, at))}]: octopage has {mine[at]}, the engine {theirs[at]}; "
                        f"{len(wrong)} of {mine.size} differ")

    def same_pages(self, mine, theirs, indptr):
        """Ranges of both lists: the same pages in any order, the last one last. Rows in which octopage met an
        invalid entry (page -1) have no meaning to compare."""
        mine, theirs, indptr = _host(mine), _host(theirs), _host(indptr)
        invalid = 0
        for row, (begin, end) in enumerate(zip(indptr[:-1], indptr[1:])):
            own, other = mine[begin:end], theirs[begin:end]
            if numpy.array_equal(own, other):
                continue
            if (own == -1).any():
                invalid += 1
            elif own.size != other.size:
                self.differ(f"row {row} ends at {end}, but the engine's list has {theirs.size} entries")
            elif own[-1] != other[-1] or not numpy.array_equal(numpy.sort(own), numpy.sort(other)):
                entry = int(numpy.argmax(own != other))
                self.differ(f"pages of row {row}, entry {entry}: octopage has {own[entry]}, the engine {other[entry]}")
        if invalid:
            self.note(f"{invalid} rows have invalid regions, owners or table entries; such rows are not compared",
                      "invalid")

    def close(self, what, mine, theirs, rows, bound):
        """Heads of some rows, by the norm of their difference; one that is finite on one side only is wrong."""
        mine, theirs = mine[rows], theirs[rows]
        broken, other = ~numpy.isfinite(mine).all(axis=-1), ~numpy.isfinite(theirs).all(axis=-1)
        usable = ~(broken | other)[..., None]
        mine, theirs = numpy.where(usable, mine, 0), numpy.where(usable, theirs, 0)
        error, norm = numpy.linalg.norm(mine - theirs, axis=-1), numpy.linalg.norm(theirs, axis=-1)
        excess = numpy.where(broken != other, numpy.inf, error - bound * norm)
        if excess.size and excess.max() > 1e-30:
            row, head = numpy.unravel_index(numpy.argmax(excess), excess.shape)
            said = f"{'octopage' if broken[row, head] else 'the engine'} gives a value that is not finite" \
                if broken[row, head] != other[row, head] else \
                f"differ by {error[row, head]:.3g} of {norm[row, head]:.3g}, allowed is {bound:g} of it"
            self.differ(f"{what} of row {rows[row]}, head {head}: {said}")

    def close_values(self, what, mine, theirs, bound=0.0, floor=0.0):
        """Single values within `bound` of the engine's plus `floor`; NaN equals NaN."""
        mine, theirs = _host(mine), _host(theirs)
        if mine.shape != theirs.shape:
            self.differ(f"{what}: octopage has shape {mine.shape}, the engine {theirs.shape}")
        wrong = numpy.argwhere(~numpy.isclose(mine, theirs, rtol=bound, atol=floor, equal_nan=True))
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            self.differ(f"{what}[{', '.join(map(str, at))}]: octopage has {mine[at]}, the engine {theirs[at]}, "
                        f"allowed is {bound:g} of it; {len(wrong)} of {mine.size} differ")


def _arguments(function, *args, **kwargs):
    """Arguments by name; a TypeError where `function` would raise one."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


class _Shadow:
    """What is compared after both have run: (call, octopage's function, the engine's, arguments) -> its result."""

    @staticmethod
    def kv_page_stride(call, ours, theirs, args, kwargs):
        mine, result = call.both(lambda: ours(*args, **kwargs), theirs, args, kwargs)
        if _arguments(theirs, *args, **kwargs)["cache"].shape[0] > 1:  # the stride of one block means nothing
            call.same("page stride", int(mine), int(result))
        return result

    @staticmethod
    def view_sparse_kv_pages(call, ours, theirs, args, kwargs):
        mine, result = call.both(lambda: ours(*args, **kwargs), theirs, args, kwargs)
        for name, own, other in zip("KV", mine, result):
            call.same(f"address, shape and strides of {name}", _layout(own), _layout(other))
        return result

    @staticmethod
    def compact_page_metadata(call, ours, theirs, args, kwargs):
        mine, result = call.both(lambda: ours(*args, **kwargs), theirs, args, kwargs)
        for name, own, other in zip(("indptr", "last_page_len"), mine, result):
            call.same_integers(name, own, other)
        return result

    @staticmethod
    def plan_staged_prefill_pages(call, ours, theirs, args, kwargs):
        mine, result = call.both(lambda: ours(*args, **kwargs), theirs, args, kwargs)
        given = _arguments(theirs, *args, **kwargs)
        call.same_integers("pages", mine.pages, result.pages)
        # Entries past a request's length mean nothing.
        block_size = int(given["block_size"])
        live = numpy.array([-(-int(n) // block_size) for n in _tensor.host_integers("lengths", given["lengths"])])
        own, other = _host(mine.table), _host(result.table)
        call.same("shape of table", own.shape, other.shape)
        meant = numpy.arange(own.shape[1]) < live[:, None]
        call.same_integers("table", numpy.where(meant, own, 0), numpy.where(meant, other, 0))
        return result

    @staticmethod
    def stage_prefill_pages(call, ours, theirs, args, kwargs):
        mine, result = call.both(lambda: ours(*args, **kwargs), theirs, args, kwargs)
        call.close_values("staged cache", mine, result, *STAGED_BOUNDS[_tensor.dtype_name("dtype", mine.dtype)])
        return result

    @staticmethod
    def fill_prefill_pages(call, ours, theirs, args, kwargs):
        given = _arguments(theirs, *args, **kwargs)
        own = dict(given, pages=_copy(given["pages"]))
        copies = given.get("contiguous_query") is not None and given.get("query") is not None
        if copies:
            own["contiguous_query"] = _copy(given["contiguous_query"])
        _, result = call.both(lambda: ours(**own), theirs, args, kwargs)
        call.same_pages(own["pages"], given["pages"], given["indptr"])
        if copies:
            call.close_values("contiguous_query", own["contiguous_query"], given["contiguous_query"])
        return result


class _PlanShadow:
    """octopage's plan beside one of the engine's, with memory and a workspace of its own: an engine may keep
    things in its workspace from `plan` to `finish`."""

    KEY = "_octopage_shadow"  # where the engine's object holds it
    RESTING = "_octopage_resting_shadow"  # where a capture has passed it by, until the next plan

    def __init__(self, own):
        self.own = own

    def plan(self, call, plan, theirs, args, kwargs):
        given = _plan_arguments(theirs, plan, args, kwargs)
        if not hasattr(given["positions"], "__len__"):  # both must see them all
            given["positions"] = list(given["positions"])
        _, result = call.both(lambda: self.own.plan(**given), theirs, (plan,), given)
        self.dtype = _tensor.dtype_name("dtype", given["dtype"])
        self._same_ranges(call, plan)
        call.same("query_shape", self.own.query_shape, tuple(int(n) for n in plan.query_shape))
        call.same("region_count", int(self.own.region_count), int(plan.region_count))
        call.same("block_size", int(self.own.block_size), int(plan.block_size))
        return result

    def fixup_positions(self, call, plan, theirs, args, kwargs):
        _, result = call.both(lambda: self.own.fixup_positions(*args, **kwargs), theirs, (plan, *args), kwargs)
        self._same_ranges(call, plan)
        return result

    def page_metadata(self, call, plan, theirs, args, kwargs):
        mine, result = call.both(lambda: self.own.page_metadata(*args, **kwargs), theirs, (plan, *args), kwargs)
        call.same("whether there is metadata", mine is not None, result is not None)
        if mine is not None:
            for field in ("owners", "block_table", "indptr", "block_size", "page_stride"):
                call.same_integers(field, getattr(mine, field), getattr(result, field))
        return result

    def prepare_chunk(self, call, plan, theirs, args, kwargs):
        given = _plan_arguments(theirs, plan, args, kwargs)
        _, result = call.both(lambda: self.own.prepare_chunk(**given), theirs, (plan, *args), kwargs)
        begin = int(given["start"])
        end = begin + int(given["query"].shape[0])
        call.same_pages(self.own.pages, plan.pages, self.own.indptr[begin:end + 1])
        call.close_values("query_buffer", self.own.query_buffer[begin:end], plan.query_buffer[begin:end])
        return result

    def finish(self, call, plan, theirs, args, kwargs):
        given = _plan_arguments(theirs, plan, args, kwargs)
        out = given["out"]
        dtypes = {_tensor.dtype_name("out", out.dtype), _tensor.dtype_name("cache", given["cache"].dtype), self.dtype}
        own = _tensor.empty_like(out, tuple(out.shape), _tensor.dtype_name("out", out.dtype))

        def attend():
            # An indexer may have written the engine's list itself: octopage attends to the same pages.
            count = int(_host(self.own.indptr)[-1])
            self.own.pages[:count] = plan.pages[:count]
            self.own.finish(**{**given, "out": own})

        _, result = call.both(attend, theirs, (plan, *args), kwargs)
        rows = self._meaningful_rows(call, plan, given["cache"])
        call.close("out", _host(own), _host(out), rows, OUTPUT_BOUND_BF16 if "bf16" in dtypes else OUTPUT_BOUND)
        return result

    def _meaningful_rows(self, call, plan, cache):
        """Rows that have pages, all of them in the cache: octopage skips others, the engine reads anything there."""
        indptr = _host(self.own.indptr)
        rows = numpy.flatnonzero(numpy.diff(indptr))
        if len(rows) == 0:
            return rows
        listed = _host(plan.pages[:int(indptr[-1])])
        keys, _ = _core.view_sparse_kv_pages(_tensor.view("cache", cache)[0])
        outside = numpy.add.reduceat((listed < 0) | (listed >= keys.shape[0]), indptr[rows], dtype=numpy.int64)
        if outside.any():
            call.note(f"{numpy.count_nonzero(outside)} rows list pages outside the cache; such rows are not compared",
                      "outside")
        return rows[outside == 0]

    def _same_ranges(self, call, plan):
        own = self.own.indptr
        call.same_integers("indptr", own, plan.indptr[:own.shape[0]])


def _plan_arguments(method, plan, args, kwargs):
    given = _arguments(method, plan, *args, **kwargs)
    del given[next(iter(given))]  # self
    return given


def _copy(tensor):
    return tensor.clone() if _tensor.framework(tensor) == "torch" else tensor.copy()


def _host(values):
    """An array of numpy: f64 for floats, integers as they are."""
    kind = _tensor.framework(values)
    if kind == "torch":
        values = values.detach()
        values = (values.double() if values.is_floating_point() else values).cpu().numpy()
    elif kind == "cupy":
        values = values.get()
    array = numpy.asarray(values)
    return array if array.dtype.kind in "iub" else array.astype(numpy.float64)


def _layout(tensor):
    described, _ = _tensor.view("views", tensor)
    shape = tuple(described.shape)
    return described.pointer, shape, tuple(s for s, n in zip(described.strides, shape) if n != 1)
