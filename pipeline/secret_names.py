"""Which names say that their value is a secret, and which values are none whatever they are called."""

from __future__ import annotations

import re
from functools import lru_cache

UNCERTAIN, SECRET, PASSWORD = 1, 2, 3
"""How sure a name says it: `token` may be a tokenizer's, `api_key` has a key, a password may be any word."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_QUALIFIERS = _set(
    "prod production dev staging test old new current backup value val str string text plain base64 b64 "
    "hex ro rw header env0 default"
)
_PASSWORDS = re.compile(r"(?:password|passwd|passphrase|passcode|sshpass)$")
_SECRETS = re.compile(
    r"(?:password|secret|credential|apikey|apitoken|accesskey|secretkey|privatekey|signingkey|encryptionkey|authkey"
    r"|accesstoken|refreshtoken|sessiontoken|securitytoken|authtoken|bearertoken|privatetoken|secretaccesskey"
    r"|connectionstring|connstr|authorization|clientsecret|secretkeybase|sessionid|sessid)s?$"
)
_BEFORE_PASS = _set(
    "db database smtp mail email user ftp admin root mysql pg postgres redis ssh login auth proxy http "
    "registry sudo vpn wifi ldap key store keystore mongo rabbitmq"
)
_KINDS_OF_KEY = _set(
    "account storage ssh deploy shared service session license subscription client hmac aes rsa jwt admin "
    "auth master signing encryption crypto write ingest integration openai anthropic wandb hf huggingface "
    "google gemini azure aws stripe sendgrid mailgun comet neptune mistral cohere groq together replicate "
    "deepseek langsmith pinecone datadog tavily serper fireworks nvidia ngc access secret private api"
)
_HARMLESS_KEYS = _set(
    "primary foreign sort partition cache group index map dict public query row column object state "
    "group_by lookup rng prng hash route routing shortcut hot unique natural composite"
)
# Tokens that a tokenizer has, or that are counted.
_OF_TOKENIZERS = _set(
    "eos bos pad unk sep cls mask image video audio start end stop special extra additional prefix suffix "
    "middle decoder encoder max min num per first last next prev previous new word text think thinking "
    "tool system assistant eot eom fim boi eoi content begin beginning sub input output target label reward "
    "memory register class cross single current newline space language lang sot nl eod document separator "
    "soft virtual prompt unknown padding masked sample generated predicted likeliest"
)
_SIGNATURES = frozenset({"sig", "signature", "sas"})
_OTHER = frozenset({"auth", "oauth", "pat", "cookie", "cookies", "bearer", "dsn", "webhook", "jwt", "otp"})
_URLS = frozenset({"url", "uri", "address"})
_HOOKS = frozenset({"webhook", "hook"})
# What a variable whose name has AUTH ends with where it is about a method or a place.
_ABOUT_AUTH = _set(
    "sock file path dir folder url uri host port type method mode user username enabled enable provider "
    "endpoint scheme audience domain id name timeout ttl realm region server service backend class module "
    "plugin"
)
_STATUS = _set(
    "required missing wrong invalid incorrect expired empty none null nil true false optional string str "
    "unset redacted hidden changed denied rejected undefined default yes no on off enabled disabled basic "
    "digest oauth oauth2 ntlm kerberos anonymous bearer token password secret ok failed unknown mismatch "
    "authentication not must is was the a an and or to for in of with if bool int float type bytes any "
    "self args kwargs given prompt env environment keyring ask inherit"
)
_SPECIAL_TOKEN = re.compile(r"<[^<>]*>|\[[A-Za-z_ ]+\]|</s>|[▁Ġ#]\S*|\{[^{}]*\}")
_VARIABLE = re.compile(r"\$\{?\{?[\w. ]+\}?\}?|%\w+%|\{\{.*\}\}|\$\(.*\)|os\.environ\b.*|env\(.*")
_METAVAR = re.compile(
    r"(?:YOUR|MY|THE)?_?[A-Z_]*(?:TOKEN|KEY|PASSWORD|SECRET|VALUE|ENV|VAR|FILE|PATH|NAME)[A-Z_]*"
)
_PATH = re.compile(
    r"(?:~|\.{1,2})?/(?:[\w.@%+ -]+/)+[\w.@%+ -]*|(?:~|\.{1,2})/[\w.-]*|/[\w-]+(?:\.\w+)?|[A-Z]:\\.*"
)
_CAMEL_CASE = re.compile(r"(?>(?:[A-Z]{0,5}+[a-z]{2,}+[._-]?+)+)[A-Z]{0,5}")


@lru_cache(maxsize=4096)
def strength_of(name: str) -> int:
    """Return how surely a value of this name is a secret: 0, UNCERTAIN, SECRET or PASSWORD."""
    words = [word.lower() for word in _WORDS.findall(name)]
    while len(words) > 1 and (words[-1] in _QUALIFIERS or words[-1].isdigit()):
        words.pop()
    if not words:
        return 0
    last, before, joined = words[-1], words[-2] if len(words) > 1 else "", "".join(words)
    if _PASSWORDS.search(joined) or last == "pwd":
        return PASSWORD
    if last == "pass" and (before in _BEFORE_PASS or (before and name.isupper())):
        return PASSWORD
    if _SECRETS.search(joined) and before != "public":
        return SECRET
    if last == "key" and before:
        is_header = name.isupper() or name.lower().startswith("x-")
        is_one = before in _KINDS_OF_KEY or (is_header and before not in _HARMLESS_KEYS)
        return UNCERTAIN if is_one else 0
    if last.endswith("token"):
        kind = last.removesuffix("token") or before
        return 0 if kind in _OF_TOKENIZERS else UNCERTAIN
    if last in _URLS and before in _HOOKS:
        return UNCERTAIN
    return UNCERTAIN if last in _OTHER | _SIGNATURES else 0


@lru_cache(maxsize=4096)
def is_secret_variable(name: str, value: str) -> bool:
    """Whether the value of this environment variable is to be hidden wherever it stands in a text.

    A short or common word is not: it would be hidden in every sentence.
    """
    if len(value) < 6 or value.lower() in _STATUS or is_placeholder(value, UNCERTAIN):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    has_auth = re.search(r"AUTH(?!OR(?!IZ))", name.upper()) and words[-1] not in _ABOUT_AUTH
    if not (has_auth or strength_of(name) or words[-1:] == ["pat"]):
        return False
    if value.isalpha():  # a word: one of eight letters or more that is none of those above
        return len(value) >= 8
    return not value.isdigit() or len(value) >= 8


def is_placeholder(value: str, strength: int) -> bool:
    """Whether a value stands for a secret, or is something else: a variable, a path, a tokenizer's token."""
    text = value.strip()
    if not any(character.isalnum() for character in text) or "[redacted]" in text:
        return True
    if text.lower() in ("none", "null", "true", "false", "nil", "undefined") or _VARIABLE.fullmatch(text):
        return True
    if _SPECIAL_TOKEN.fullmatch(text) or _METAVAR.fullmatch(text) or text.endswith("..."):
        return True
    if strength == PASSWORD:
        return bool(_PATH.fullmatch(text)) and text.count("/") > 1
    if text.lower() in _STATUS or _PATH.fullmatch(text):
        return True
    return strength == UNCERTAIN and bool(re.fullmatch(r"-?\d{1,7}(?:\.\d+)?", text))


def looks_random(value: str, least: int) -> bool:
    """Whether a value looks drawn, not written: letters and digits, symbols, or capitals within a word."""
    if len(value) < least or " " in value or not any(character.isalpha() for character in value):
        return False
    if any(character.isdigit() for character in value) or re.search(r"[!$%^*+=~]", value):
        return True
    return bool(re.search(r"[a-z][A-Z]", value)) and not _CAMEL_CASE.fullmatch(value)
