"""Seeing a run: follow it, list what is deployed, read its log, and keep a report of it."""

from local.view.follow import follow
from local.view.logs import logs
from local.view.report import report
from local.view.status import status
from local.view.store import Store

__all__ = ["Store", "follow", "logs", "report", "status"]
