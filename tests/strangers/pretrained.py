import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from strangers.encoder import sentences  # noqa: F401 (the data of this project, too)


class Classifier(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(path, add_pooling_layer=False)
        self.head = nn.Linear(self.encoder.config.hidden_size, 3)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.encoder(input_ids, attention_mask).last_hidden_state
        return {"loss": nn.functional.cross_entropy(self.head(hidden[:, 0]).float(), labels)}


def classifier(path):
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, dtype=torch.float32)
