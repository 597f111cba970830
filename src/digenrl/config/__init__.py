"""Configuration: compose, check everything before torch is imported, instantiate behind an
allow-list.

    composed = config.load(sys.argv[1:])        # raises ConfigError with every problem; `load_or_exit` prints and exits
    run_dir = config.prepare_run_dir(composed)  # the first thing that is written
    model = composed.settings.build("model")

Importing this package imports Hydra, but neither torch nor Lightning.
"""  # noqa: E501

from digenrl.config.compose import group_options
from digenrl.config.errors import ConfigError
from digenrl.config.loading import EXIT_CODE, Composed, load, load_or_exit
from digenrl.config.output_dir import prepare_run_dir, prepare_run_dir_or_exit, store_config
from digenrl.config.shipped import config_directory
from digenrl.config.targets import instantiate

__all__ = [
    "EXIT_CODE",
    "Composed",
    "ConfigError",
    "config_directory",
    "group_options",
    "instantiate",
    "load",
    "load_or_exit",
    "prepare_run_dir",
    "prepare_run_dir_or_exit",
    "store_config",
]
