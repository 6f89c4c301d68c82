"""The main job, end to end, on a model that ships with the library or on a real one."""

from kvjax.demo.presets import PRESETS
from kvjax.demo.report import write_report
from kvjax.demo.run import DemoReport, run_demo

__all__ = ["PRESETS", "DemoReport", "run_demo", "write_report"]
