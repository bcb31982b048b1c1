"""OpenAI's files and batches."""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.api.answers import HTTP_STATUSES, ErrorAnswer, HttpError
from gateway.api.batches.runner import Batches, BatchLimits, opened
from gateway.api.batches.store import BatchStore, FileRow
from gateway.api.body import BodyLimits, max_entries, read_model
from gateway.api.field_rule import NOTHING, Part, Unread
from gateway.api.front import Front, FrontContext
from gateway.api.openapi import AnyObject, ApiRoute
from gateway.auth.caller import current_caller
from gateway.request.body_memory import BodyMemory
from gateway.request.counting import EntryLimits
from gateway.request.violations import Violations, shortened
from gateway.turns import Turns
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import Unavailable, Unimplemented, invalid_field

_OTHER_ENDPOINTS = ("/v1/embeddings", "/v1/moderations", "/v1/images/generations", "/v1/images/edits", "/v1/videos")
_WINDOW_S = 24 * 3600
_MAX_NAME = 255
_MAX_PAGE = {"file": 10_000, "batch": 100}
_DEFAULT_PAGE = {"file": 10_000, "batch": 20}
_COPY_BYTES = 1 << 20
_RETRY_AFTER_MS = 10_000
_RANGE = re.compile(rb"bytes=([0-9]{1,15})-([0-9]{1,15})?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BatchBody(Part):
    """A new batch. `completion_window` is 24h, OpenAI's only value."""

    unread: ClassVar[Unread] = NOTHING

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str] | None, max_entries(16)] = None


def open_front(context: FrontContext) -> Front:
    """Opens the front, whose batches have requests of the fronts that are open already. Without --batch-dir all calls
    are rejected. Raises ConfigurationError if the directory cannot be used."""
    settings = context.settings
    call_readers = {path: read for front in context.opened for path, read in front.call_readers.items()}
    if settings.batch_dir is None:
        return Front(routes=batch_routes(None, context.body_limits, list(call_readers)))
    # A separate memory limit, so that batches take no memory from callers that wait for an answer.
    max_bytes = settings.max_total_body_bytes // 4
    batches = Batches(
        context.models,
        BatchStore(settings.batch_dir, context.gateway_id, settings.max_batch_dir_bytes),
        context.authenticator,
        call_readers,
        BatchLimits(
            settings.max_batch_requests,
            settings.max_batch_file_bytes,
            settings.max_message_bytes,
            EntryLimits(settings.max_chat_messages),
        ),
        BodyMemory(max_bytes, max_bytes // 2 if settings.keys_files else None),
        gateway_id=context.gateway_id,
        concurrency=settings.batch_concurrency,
    )
    return Front(
        routes=batch_routes(batches, context.body_limits, list(call_readers)),
        tasks={"batches": batches.run},
        stop_runs=batches.stop_runs,
        close=batches.store.close,
    )


def batch_routes(batches: Batches | None, body_limits: BodyLimits, endpoints: Sequence[str]) -> list[ApiRoute]:
    """The routes. Without `batches` all calls are rejected, with the flag that enables them. A batch has requests for
    one of the `endpoints`."""
    routes = _BatchRoutes(batches, body_limits, endpoints)
    return [
        ApiRoute("/v1/files", routes.list_files, errors=HTTP_STATUSES),
        ApiRoute("/v1/files", routes.upload, method="POST", errors=HTTP_STATUSES),
        ApiRoute("/v1/files/{file_id}", routes.get_file, errors=HTTP_STATUSES),
        ApiRoute("/v1/files/{file_id}", routes.delete, method="DELETE", errors=HTTP_STATUSES),
        ApiRoute(
            "/v1/files/{file_id}/content", routes.content, media_type="application/octet-stream", errors=HTTP_STATUSES
        ),
        ApiRoute("/v1/batches", routes.list_batches, errors=HTTP_STATUSES),
        ApiRoute("/v1/batches", routes.create, method="POST", body=BatchBody, errors=HTTP_STATUSES),
        ApiRoute("/v1/batches/{batch_id}", routes.get_batch, errors=HTTP_STATUSES),
        ApiRoute("/v1/batches/{batch_id}/cancel", routes.cancel, method="POST", errors=HTTP_STATUSES),
    ]


class _BatchRoutes:
    def __init__(self, batches: Batches | None, body_limits: BodyLimits, endpoints: Sequence[str]) -> None:
        self._batches = batches
        self._body_limits = body_limits
        self._endpoints = endpoints

    @property
    def _here(self) -> Batches:
        if self._batches is None:
            raise Unimplemented("this gateway has no files and batches; --batch-dir enables them")
        return self._batches

    async def upload(self, request: Request) -> AnyObject:
        """Stores a file with the requests of a batch."""
        store, tenant, limit = self._here.store, current_caller().tenant, self._here.limits.max_file_bytes
        await store.run(store.files.check_room, tenant, 0)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            message = "content-type must be multipart/form-data; the file is its part `file`"
            raise HttpError(ErrorAnswer(415, message, "unsupported_media_type"))
        parser = MultiPartParser(request.headers, _bounded(request, limit), max_files=1, max_fields=16)
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError, ValueError) as error:
            raise invalid_field("file", f"cannot be read from the form: {error!s:.200}") from error
        except OSError as error:
            raise _not_kept(error) from error
        try:
            purpose, file = form.get("purpose"), form.get("file")
            if not isinstance(purpose, str):
                raise invalid_field("purpose", "is missing; it must be batch")
            if purpose != "batch":
                raise invalid_field("purpose", f'is "{shortened(purpose)}"; it must be batch')
            if not isinstance(file, UploadFile):
                raise invalid_field("file", "is missing; it is a part with a filename")
            # Shielded, so that the file is stored either as a whole or not at all if the caller disconnects.
            row = await asyncio.shield(_store(store, file, limit, tenant, purpose))
        except OSError as error:
            raise _not_kept(error) from error
        finally:
            await form.close()
        return row.shown()

    async def list_files(self, request: Request) -> AnyObject:
        """The files of the caller's tenant, newest first."""
        store, query = self._here.store, request.query_params
        rows = await store.run(store.files.all, current_caller().tenant, query.get("purpose"))
        page, has_more = _page("file", [row.id for row in rows], query)
        chosen = {row.id: row for row in rows}
        return _list_of([chosen[file_id].shown() for file_id in page], has_more=has_more)

    async def get_file(self, request: Request) -> AnyObject:
        """A file, without its content."""
        store = self._here.store
        row = await store.run(store.files.find, current_caller().tenant, request.path_params["file_id"])
        return row.shown()

    async def content(self, request: Request) -> Response:
        """The content of a file."""
        store = self._here.store
        row = await store.run(store.files.find, current_caller().tenant, request.path_params["file_id"])
        path = store.files.path_of(row.id)
        with opened(path):
            return _Content(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> AnyObject:
        """Deletes a file that no running batch reads."""
        store, file_id = self._here.store, request.path_params["file_id"]
        await store.run(store.files.remove, current_caller().tenant, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    async def create(self, request: Request) -> AnyObject:
        """Creates a batch: the requests of a file run when there is room."""
        store, caller = self._here.store, current_caller()
        body = await read_model(BatchBody, request, self._body_limits)
        violations = Violations()
        await self._body_limits.rule.check_by_turns(violations, body, "batches", Turns())
        if body.endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            why = "is for other kinds of models" if body.endpoint in _OTHER_ENDPOINTS else "is not known"
            violations.add("endpoint", f'is "{shortened(body.endpoint)}", which {why}; it must be one of {known}')
        if any(len(name) > 64 or len(value) > 512 for name, value in (body.metadata or {}).items()):
            violations.add("metadata", "has a name of more than 64 characters, or a value of more than 512")
        violations.raise_if_any()
        row = await store.run(
            store.add_batch,
            *(caller.tenant, caller.key_id, body.input_file_id, body.endpoint, _WINDOW_S, body.metadata),
        )
        return row.shown()

    async def list_batches(self, request: Request) -> AnyObject:
        """The batches of the caller's tenant, newest first."""
        store, tenant = self._here.store, current_caller().tenant
        page, has_more = _page("batch", await store.run(store.batch_ids, tenant), request.query_params)
        rows = await store.run(store.batches, tenant, page)
        return _list_of([row.shown() for row in rows], has_more=has_more)

    async def get_batch(self, request: Request) -> AnyObject:
        """The state of a batch."""
        store = self._here.store
        row = await store.run(store.batch, current_caller().tenant, request.path_params["batch_id"])
        return row.shown()

    async def cancel(self, request: Request) -> AnyObject:
        """Cancels a batch. Its results contain the answers up to then."""
        store = self._here.store
        row = await store.run(store.cancel, current_caller().tenant, request.path_params["batch_id"])
        return row.shown()


class _Content(FileResponse):
    """The content of a file, or one range of it; other kinds of range headers are ignored, as HTTP allows."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def is_read(name: bytes, value: bytes) -> bool:
            match = _RANGE.fullmatch(value)
            return name != b"range" or (match is not None and int(match[1]) <= int(match[2] or match[1]))

        headers = [header for header in scope["headers"] if is_read(*header)]
        await super().__call__({**scope, "headers": headers}, receive, send)


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body of an upload. Raises HttpError if it is larger than the maximum file with its form."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit + _COPY_BYTES:
            raise _too_large(limit)
        yield chunk


def _not_kept(error: OSError) -> Unavailable:
    """The error if the disk of temporary files or of the directory is full, or too many files are open."""
    return Unavailable(f"the file cannot be stored: {error.strerror}", retry_after_ms=_RETRY_AFTER_MS)


def _too_large(limit: int) -> HttpError:
    return HttpError(
        ErrorAnswer(413, f"the file has more than {shown_bytes(limit)} (--max-batch-file-bytes)", "too_large")
    )


async def _store(store: BatchStore, file: UploadFile, limit: int, tenant: str, purpose: str) -> FileRow:
    """Stores an upload. It is not copied in the store's thread, which renews leases meanwhile."""
    file_id, path = store.files.new_path()
    try:
        await asyncio.to_thread(_copy, file, path, limit)
        return await store.run(store.files.add, tenant, file_id, _name(file.filename), purpose)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _copy(file: UploadFile, path: Path, limit: int) -> None:
    """Writes an upload to its place, as a whole or not at all."""
    size = 0
    with path.open("xb") as target:
        path.chmod(0o600)
        while data := file.file.read(_COPY_BYTES):
            size += len(data)
            if size > limit:
                raise _too_large(limit)
            target.write(data)
        target.flush()
        os.fsync(target.fileno())


def _name(given: str | None) -> str:
    """The client's name of a file, for display: it is stored as a text and never used as a path."""
    return _CONTROL.sub("", given or "")[:_MAX_NAME] or "file"


def _page(kind: str, ids: Sequence[str], query: Mapping[str, str]) -> tuple[Sequence[str], bool]:
    """The requested page of a list, which is ordered newest first, and whether there are more entries. Raises
    InvalidArgument for an invalid parameter."""
    text = query.get("limit", str(_DEFAULT_PAGE[kind]))
    limit = int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0
    if not 1 <= limit <= _MAX_PAGE[kind]:
        raise invalid_field("limit", f'is "{shortened(text)}"; it must be in [1, {_MAX_PAGE[kind]:,}]')
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_field("order", f'is "{shortened(order)}"; it must be asc or desc')
    ordered = list(ids if order == "desc" else reversed(ids))
    if (after := query.get("after")) is not None:
        if after not in ordered:
            raise invalid_field("after", f'is "{shortened(after)}", which is not known')
        ordered = ordered[ordered.index(after) + 1 :]
    return ordered[:limit], len(ordered) > limit


def _list_of(items: Sequence[AnyObject], *, has_more: bool) -> AnyObject:
    """A page in OpenAI's form."""
    first_id, last_id = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first_id, "last_id": last_id, "has_more": has_more}
