"""Pushing an exported folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from t5_fsdp.errors import UserError


def check_push(repo_id: str) -> None:
    """Refuse, before there is anything to push, what is sure to fail.

    Raises:
        UserError: the id is none, the Hub is switched off or not reached, or it does not know who
            we are.
    """
    from huggingface_hub import HfApi, get_token, is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"--push_to_hub {repo_id!r} is no repository id ({error})") from None
    if is_offline_mode():
        raise UserError(
            f"--push_to_hub {repo_id}: HF_HUB_OFFLINE is set; unset it, or leave the option out"
        )
    if get_token() is None:
        raise UserError(
            f"--push_to_hub {repo_id}: there is no access token; log in with `hf auth login`, or "
            "set HF_TOKEN"
        )
    try:
        HfApi().whoami()
    except Exception as error:  # of the HTTP library and the Hub's own, whatever a network can do
        raise _failed(repo_id, error, "nothing was exported") from None


def push(folder: Path, repo_id: str, private: bool) -> str:
    """Upload a folder as a model repository, which is made if it is not there; its address.

    Raises:
        UserError: the Hub refuses it or is not reached; the folder stays as it is.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(repo_id, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message="Upload the model"
        )
    except Exception as error:  # as above
        raise _failed(repo_id, error, f"the exported folder is {folder}") from None
    return str(repository)


def _failed(repo_id: str, error: Exception, left: str) -> UserError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return UserError(
        f"--push_to_hub {repo_id} failed ({reason}); check the token's rights and the network; "
        f"{left}"
    )
