"""A document in the body of a request: its text as JSON, or a file in a form."""

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

from starlette.datastructures import UploadFile
from starlette.requests import Request

from dodo.data.extraction import extract
from dodo.errors import UnsupportedFileError
from dodo.serving.failures import ApiError
from dodo.serving.schemas import DocumentRequest

__all__ = ["File", "body", "read"]

R = TypeVar("R", bound=DocumentRequest)


@dataclass(frozen=True)
class File:
    """What somebody sent, and under which name; "" if under none."""

    data: bytes
    name: str

    def text(self) -> str:
        """The text in it.

        Raises:
            InputError, UnsupportedFileError: see `extract`.
        """
        return extract(self.data, self.name) if self.data else ""


async def read(request: Request, form: type[R]) -> tuple[str | File, R]:
    """The text or file in a request's body, and what is wanted of it.

    Raises:
        ValidationError, ApiError, UnsupportedFileError: the body is not what `body` says.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        wanted = form.model_validate_json(await request.body())
        return wanted.text, wanted
    if kind != "multipart/form-data":
        raise UnsupportedFileError("the body must be application/json, or multipart/form-data with a file")
    async with request.form(max_files=1, max_fields=8) as parts:
        file, fields = parts.get("file"), {name: value for name, value in parts.multi_items() if name != "file"}
        if not isinstance(file, UploadFile):
            raise ApiError(422, "file: is missing; send one as a part of that name", code="invalid_value", param="file")
        if "text" in fields:
            raise ApiError(422, "text: is sent as JSON, without a file; leave it out", code="invalid_value", param="text")
        if twice := [name for name, count in Counter(name for name, _ in parts.multi_items()).items() if count > 1]:
            raise ApiError(422, f"{twice[0]}: is there more than once", code="invalid_value", param=twice[0])
        wanted = form.model_validate({**fields, "text": ""})
        return File(await file.read(), PurePath(file.filename or "").name), wanted


def body(form: type[DocumentRequest]) -> dict[str, Any]:
    """How the API's documentation says it."""
    as_json = form.model_json_schema()
    fields = {name: schema for name, schema in as_json["properties"].items() if name != "text"}
    file = {"type": "string", "format": "binary", "description": "txt, md, html, pdf, docx or nuggets."}
    as_form = {
        "type": "object",
        "required": ["file"],
        "additionalProperties": False,
        "properties": {"file": file, **fields},
    }
    kinds = {"application/json": {"schema": as_json}, "multipart/form-data": {"schema": as_form}}
    return {"requestBody": {"required": True, "content": kinds}}
