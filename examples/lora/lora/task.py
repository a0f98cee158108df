"""A transformer that reads an image as a text, and its adapters. This module does not use flower-gpu."""

import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification


def device():
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def base_model(config):
    """Return the frozen model. All clients have the same one, so it is never sent."""
    if config["base-model"]:
        return AutoModelForSequenceClassification.from_pretrained(config["base-model"], num_labels=10)
    size = BertConfig(
        vocab_size=17,  # a word is a grey level from 0 to 16
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config["seed"])
        return BertForSequenceClassification(size)


def with_adapters(config, arrays=None):
    """Return the frozen base model with the adapters in ``arrays``, or with new adapters."""
    lora = LoraConfig(
        TaskType.SEQ_CLS, r=config["rank"], lora_alpha=2 * config["rank"], target_modules="all-linear"
    )
    model = get_peft_model(base_model(config), lora)
    if arrays is not None:
        set_peft_model_state_dict(model, arrays.to_torch_state_dict())
    return model.to(device())


def adapters(model):
    """Return the weights that are sent: the adapters and the new last layer."""
    return {name: tensor.cpu() for name, tensor in get_peft_model_state_dict(model).items()}


def load_data():
    """Return all digits as texts of 16 words, the grey levels of 2 x 2 pixels, in the same random order."""
    images, labels = load_digits(return_X_y=True)
    texts = images.reshape(-1, 4, 2, 4, 2).mean((2, 4)).round().reshape(-1, 16)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.from_numpy(texts[order]).long(), torch.from_numpy(labels[order])


def load_partition(partition_id, num_partitions, batch_size):
    """Return one client's texts. The last 360 texts are held out for testing."""
    mine = (part[:-360][partition_id::num_partitions] for part in load_data())
    return DataLoader(TensorDataset(*mine), batch_size, shuffle=True)


def load_held_out(batch_size):
    return DataLoader(TensorDataset(*(part[-360:] for part in load_data())), batch_size)


def train(model, loader, epochs, lr):
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    total = 0.0
    for _ in range(epochs):
        for words, labels in loader:
            optimizer.zero_grad()
            loss = model(input_ids=words.to(device()), labels=labels.to(device())).loss
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(model, loader):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for words, labels in loader:
            labels = labels.to(device())
            outputs = model(input_ids=words.to(device()), labels=labels)
            loss += outputs.loss.item() * len(labels)
            correct += (outputs.logits.argmax(1) == labels).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)
