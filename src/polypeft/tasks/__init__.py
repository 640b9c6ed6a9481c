"""Tasks: rows from files or the hub, made into source and target texts, mixed and scored.

`task` is the record and `load`; `rows` the readers, `templates` and `splits` what load uses; `metrics` the scores; `mixing` the sampler
(imports torch, so it is not imported here); `synthetic` small tasks of our own.
"""

from polypeft.tasks.task import Row, Task, check_names, check_train, load

__all__ = ["Row", "Task", "check_names", "check_train", "load"]
