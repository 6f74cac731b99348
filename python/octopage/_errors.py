"""The exceptions of the package. Each is also the built-in exception that a caller would expect."""


class OctopageError(Exception):
    """Base of all errors that octopage raises by itself."""


class InvalidArgument(OctopageError, ValueError):
    """An argument breaks a rule; the message has argument, rule and value."""


class Unsupported(OctopageError, NotImplementedError):
    """The arguments are legal, but no backend (or not the forced one) serves them."""


class InvalidEntry(OctopageError, ValueError):
    """A strict call met an invalid region, owner or table entry."""


class WrongState(OctopageError, RuntimeError):
    """A call out of order, or one that cannot be captured."""


class OutOfMemory(OctopageError, MemoryError):
    """The library could not allocate scratch memory."""


class DeviceError(OctopageError, RuntimeError):
    """A device runtime call failed."""


class BadFile(OctopageError, ValueError):
    """A step file breaks the format."""


class InternalError(OctopageError, RuntimeError):
    """A broken invariant of the library."""


BY_CODE = {1: InvalidArgument, 2: Unsupported, 3: InvalidEntry, 4: WrongState, 5: OutOfMemory,
           6: DeviceError, 7: BadFile, 8: InternalError}
