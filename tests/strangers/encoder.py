import torch
from transformers import BertConfig, BertForSequenceClassification


def bert():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))


def collate(samples):
    length = max(len(tokens) for tokens, _ in samples)
    ids = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def sentences(split):
    starts = torch.arange(16).tolist()
    return [([start % 3 + 1] + [7] * (start % 5 + 2), start % 3) for start in starts]
