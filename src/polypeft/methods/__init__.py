"""The methods. Each is a function whose keyword-only signature is its configuration; `__all__` is the registry."""

from polypeft.methods.adapters import houlsby, parallel
from polypeft.methods.full import full
from polypeft.methods.hyperdecoder import hyperdecoder
from polypeft.methods.hyperformer import hyperformer
from polypeft.methods.lora import lora

__all__ = ["full", "houlsby", "hyperdecoder", "hyperformer", "lora", "parallel"]
