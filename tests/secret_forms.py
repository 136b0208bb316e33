"""Secrets in the forms in which programs meet them, made for the tests, and harmless text that looks similar.

No key stands whole in this file, so that scanners of repositories pass it.
"""

from __future__ import annotations

import base64
import random
import string

_random = random.Random(7)


def _made(number: int, letters: str = string.ascii_letters + string.digits) -> str:
    """Random characters, of which the first is a letter and the second a digit."""
    rest = "".join(_random.choice(letters) for _ in range(number - 2))
    return _random.choice([c for c in letters if c.isalpha()]) + "7" + rest


_HEX = "0123456789abcdef"
_UPPER = string.ascii_uppercase + string.digits
_LINES = "\n".join(_made(64) for _ in range(3))
_JWT = ".".join(["ey" + "J" + _made(20), _made(30), _made(24)])
_PAIR = base64.b64encode(b"someone:" + _made(12).encode()).decode()

# Variables of the environment that runs get in the tests.
VARIABLES = {
    "HF_TOKEN": "value-by-its-name-1",
    "AZURE_DEVOPS_PAT": "value-by-its-name-2",
    "SERVICE_AUTH_HEADER": "value-by-its-name-3",
    "DB_PASSWORD": "pw4%/x",
    "SOME_API_KEY": "value by its name 5",
    "PIPELINE_WEBHOOK": "http://127.0.0.1:9/hook/of-name-6",
    "LDAP_PASSPHRASE": "correcthorsebattery",
    "SIGNING_SECRET": 'quote"and\\slash8',
}
HARMLESS_VARIABLES = {
    "SSH_AUTH_SOCK": "/tmp/agent.1234",
    "XAUTHORITY": "/home/someone/.Xauthority",
    "TOKENIZERS_PARALLELISM": "true",
    "GOOGLE_APPLICATION_CREDENTIALS": "/etc/gcp/account.json",
    "KEY_FILE": "/etc/keys/one.pem",
    "AUTHOR": "Someone Else",
    "PRIMARY_KEY": "identifier",
    "SHORT_PASSWORD": "no",
    "API_TOKEN": "none",
    "USE_AUTH_TOKEN": "1",
}


def _forms() -> list[tuple[str, str]]:
    """(text around it with {} in its place, secret)."""
    word = _made(10)
    long = _made(40)
    return [
        # As providers write them, anywhere in a sentence.
        ("downloading with {} failed", "hf" + "_" + _made(34)),
        ("key {}", "sk" + "-" + _made(48)),
        ("key {}", "sk" + "-proj-" + _made(60)),
        ("key {}", "sk" + "-ant-api03-" + _made(80)),
        ("key {}", "sk" + "-or-v1-" + _made(64, _HEX)),
        ("({})", "AK" + "IA" + _made(16, _UPPER)),
        ("({})", "AS" + "IA" + _made(16, _UPPER)),
        ("[{}]", "gh" + "p_" + _made(36)),
        ("[{}]", "gh" + "s_" + _made(36)),
        ("[{}]", "github" + "_pat_" + _made(22) + "_" + _made(50)),
        ("{}", "gl" + "pat-" + _made(20)),
        ("{}", "gl" + "dt-" + _made(20)),
        ("{}", "np" + "m_" + _made(36)),
        ("{}", "py" + "pi-AgEIcHlwaS5vcmc" + _made(80)),
        ("{}", "sk" + "_live_" + _made(24)),
        ("{}", "sk" + "_test_" + _made(24)),
        ("{}", "rk" + "_live_" + _made(24)),
        ("{}", "wh" + "sec_" + _made(32)),
        ("{}", "xo" + "xb-123456789012-1234567890123-" + _made(24)),
        ("{}", "xo" + "xp-1234567890-" + _made(24)),
        ("{}", "xa" + "pp-1-A01-123-" + _made(40)),
        (
            "posting to https://hooks.slack.com/{}",
            "services/T" + _made(8, _UPPER) + "/B12345678/" + _made(24),
        ),
        ("posting to https://discord.com/api/webhooks/{}", "123456789012345678/" + _made(60)),
        ("{}", "AI" + "za" + _made(35)),
        ("{}", "ya" + "29." + _made(60)),
        ("{}", "GOC" + "SPX-" + _made(28)),
        ("{}", "S" + "G." + _made(22) + "." + _made(43)),
        ("{}", "S" + "K" + _made(32, _HEX)),
        ("{}", "123456789:" + _made(35)),
        ("{}", _made(32, _HEX) + "-us" + "12"),
        ("{}", "sq0" + "csp-" + _made(43)),
        ("{}", "shp" + "at_" + _made(32, _HEX)),
        ("{}", "da" + "pi" + _made(32, _HEX)),
        ("{}", "do" + "p_v1_" + _made(64, _HEX)),
        ("{}", "hv" + "s." + _made(30)),
        ("{}", "gs" + "k_" + _made(52)),
        ("{}", "r8" + "_" + _made(37)),
        ("{}", "nv" + "api-" + _made(60)),
        ("{}", "dckr" + "_pat_" + _made(27)),
        ("{}", "AGE-SECRET" + "-KEY-1" + _made(58, _UPPER)),
        ("{}", "AK" + "C" + _made(20)),
        ("cookie {}", _JWT),
        ("{}", "-----BEGIN " + f"RSA PRIVATE KEY-----\n{_LINES}\n-----END RSA PRIVATE KEY-----"),
        ("{}", "-----BEGIN " + f"OPENSSH PRIVATE KEY-----\n{_LINES}\n-----END OPENSSH PRIVATE KEY-----"),
        ("wandb login {}", _made(40, _HEX)),
        ("W&B: {}", "wandb" + "_v1_" + _made(60)),
        # In headers.
        ("Authorization: Bearer {}", _made(12)),
        ("{{'Authorization': 'Bearer {}'}}", "short" + "word"),
        ("sent with bearer {} to it", _made(20)),
        ("Authorization: Basic {}", _PAIR),
        ("Proxy-Authorization: Basic {}", _PAIR + "A"),
        ("authorization: token {}", _made(12)),
        ("X-Api-Key: {}", _made(16)),
        ("X-Auth-Token: {}", _made(16)),
        ("PRIVATE-TOKEN: {}", _made(20)),
        ("Set-Cookie: {}; Path=/", "sid=" + _made(20)),
        # In URLs.
        ("https://{}@localhost/data", "user:correct-horse"),
        ("https://{}@github.com/a/b.git", _made(30)),
        ("git+https://x-access-token:{}@github.com/a/b", _made(12)),
        ("postgres://app:{}@db:5432/x", "p@ss/word"),
        ("mysql+pymysql://root:{}@127.0.0.1/x", "swordfish"),
        ("mongodb+srv://a:{}@cluster0.mongodb.net/?retryWrites=true", "tiger" + word),
        ("redis://:{}@cache:6379/0", "pw" + word),
        ("amqps://a:{}@mq/vhost", "lion" + word),
        ("s3://{}@bucket/key", "KEYOFMINE:" + _made(30) + "/x+y"),
        ("jdbc:oracle:thin:{}@//db:1521/x", "scott/tiger7"),
        ("jdbc:postgresql://db/x?user=a&password={}", "swordfish" + "2"),
        ("https://h/x?X-Amz-Credential={}&X-Amz-Date=20260101T000000Z", _made(20, _UPPER) + "%2F2026"),
        ("https://h/x?a=b&X-Amz-Signature={}", _made(64, _HEX)),
        ("https://h/x?X-Amz-Security-Token={}&x=1", _made(80)),
        ("https://h/x?X-Goog-Signature={}", _made(64, _HEX)),
        ("https://a.blob.core.windows.net/c?sv=2022&sig={}&se=2026", _made(40) + "%3D"),
        ("https://h/x?Expires=1&Signature={}&Key-Pair-Id=A", _made(50)),
        ("https://h/x?access_token={}", "zqwvk" + "jxm"),
        ("https://h/x?y=1&api_key={}#top", _made(12)),
        # By a name in front.
        ("password: {}", "hunter2"),
        ("password: {}", "swordfish"),
        ("password={}", "x1"),
        ("login(user='a', password='{}')", "a b"),
        ('{{"password": "{}"}}', "short"),
        ('{{\\"password\\": \\"{}\\"}}', "escaped"),
        ("{{'db_passwd': '{}', 'n': 1}}", "it was me"),
        ("passphrase = '{}'", "open sesame"),
        ("Server=db;User Id=sa;Pwd={};Encrypt=true", "Sw0rd!fish"),
        ("Server=db;User Id=sa;Password={};", "fish)and,chips"),
        ("AccountName=a;AccountKey={};EndpointSuffix=x", _made(86) + "=="),
        ("Endpoint=sb://x/;SharedAccessKeyName=root;SharedAccessKey={}", _made(43) + "="),
        ("export OPENAI_API_KEY={}", _made(20)),
        ("aws_secret_access_key = {}", "wJa" + "lr/" + _made(34)),
        ("AWS_SESSION_TOKEN={}", long),
        ("client_secret: {}", _made(24)),
        ('api_key = "{}"', "qvzkj" + "xwmpb"),
        ("os.environ['MY_SECRET'] = '{}'", "quiet please"),
        ('{{"auths": {{"r.io": {{"auth": "{}"}}}}}}', _PAIR),
        ("//registry.npmjs.org/:_authToken={}", _made(30)),
        ("hub_token='{}'", _made(12)),
        ("GITHUB_PAT={}", _made(20)),
        ("machine a.b login me password {}", "netrcword"),
        ("<password>{}</password>", "in xml"),
        # On command lines.
        ("train.py --token {}", _made(10)),
        ("train.py --token={}", "swordfish"),
        ("train.py --password {} --x 1", "swordfish" + "z"),
        ("['train.py', '--api-key', '{}', 'x']", "swordfish" + "y"),
        ("curl -u someone:{} https://h", "curlword"),
        ("docker login -u me -p {}", "dockerword"),
        ("sshpass -p '{}' ssh h", "sshword"),
        ("mysql -u root -p{} x", "mysqlword"),
    ]


FORMS = [(text.format(secret), secret) for text, secret in _forms()]
"""(text, the secret in it)."""
HARMLESS = [
    "eos_token: </s>",
    '"eos_token": "<|endoftext|>", "pad_token": "[PAD]"',
    "pad_token='<pad>'",
    "bos_token_id=1, eos_token_id=50256",
    "image_token: <image>",
    "primary_key: identifier_17",
    "sort_key=created_at2",
    "group_key = 'name'",
    "public_key: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc",
    "max_tokens: 2048",
    "max_new_tokens=48, tokens_seen: 1048576",
    "perf/tokens_per_second: 12345.6",
    "tokens_per_second=31337",
    "token = tokenizer.encode(text)",
    "token: Internationally",
    "for key in keys:",
    "key: value",
    "error: data.kind: text",
    'tokenizer: "gpt2"',
    "data.tokenizer.pretrained: meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2.5-0.5B",
    "sk-learn-compatible-estimators are listed",
    "num_key_value_heads: 8",
    "data.tokenizer.vocab_size=32000",
    "index 0123456..89abcde 100644",
    "revision: " + "0123456789" * 4,
    "commit " + "89abcdef01" * 4,
    "89abcdef01" * 4,
    '"data": "' + "0f1e2d3c" * 4 + '"',
    "fingerprint " + "0f1e2d3c" * 8,
    "sha256:" + "0f1e2d3c" * 8,
    "model.safetensors  " + "0f1e2d3c" * 8,
    "docker://ubuntu:22.04@sha256:" + "0f1e2d3c" * 8,
    "bearer of bad news",
    "Bearer tokens are accepted; Basic authentication is not",
    "Basic information about the run",
    "the password was wrong, and the token has expired",
    "password: required",
    "enter the password: ",
    "--password PASSWORD  the database's",
    "--token is missing",
    "argument --token: expected one argument",
    "a secret: the loss is infinite",
    "login(password=password, token=self.token)",
    "password = getpass.getpass()",
    "token = os.environ['HF_TOKEN']",
    "api_key=None, token=True",
    "export WANDB_API_KEY=...",
    "export HF_TOKEN=$HF_TOKEN",
    "https://localhost:8080/a@b/c?page=2&key=name",
    "https://medium.com/@someone/post",
    "https://huggingface.co/meta-llama/Llama-3.1-8B/resolve/main/config.json",
    "ssh://git@github.com/org/repo.git",
    "git@github.com:org/repo",
    "someone@example.com wrote to a.b+c@localhost",
    "c10d://[::1]:29500/x@y",
    "hdfs://name:8020/user@x",
    "W&B run: https://wandb.ai/team/project/runs/a1b2c3d4",
    "550e8400-e29b-41d4-a716-446655440000",
    "/home/someone/runs/tiny-20261127-101500/checkpoints/step-00000100",
    "private_key: /etc/ssl/private/server.pem",
    "secret_name: my-secret, secretKeyRef: {name: a}",
    "author: Someone2, authors: [a1b2c3d4e5]",
    "auth: none",
    "signature: (input_ids, labels)",
    "first_pass=2 passes: 3 pass: 12",
    "PWD=/home/someone OLDPWD=/tmp",
    "train/loss=2.3456789 eval/loss 1.25 [3/10]",
    "docker run -u 1000:1000 -p 8080:80 image",
    "rsync -u a:b host:c",
    "2026-11-27 10:15:00,123 INFO pipeline.training.loop step 10: loss 2.345",
    "torch.Size([2, 1024, 4096]) dtype=torch.bfloat16 device='cuda:0'",
    "model.layers.0.self_attn.k_proj.weight",
    "Signed-off-by: Someone <someone@example.com>",
    "AKIA is how such a key begins; hf_ too",
]
