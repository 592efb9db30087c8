//! A checkpoint is a model directory: the library and `astrai run` take it as it is.

use crate::train::fixture::{good, program, small, stderr};
use astrai_engine::model::Model;
use astrai_ir::DType;
use astrai_runtime::weights::{Checkpoint, write};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

#[test]
fn a_checkpoint_is_a_model_directory() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in ["f32", "bf16"] {
        let out = dir.path().join(dtype);
        let tokenizer = crate::train::fixture::shared().join("run/tokenizer");
        let flags = ["--steps", "3", "--batch", "4", "--dtype", dtype];
        good(small(&out).args(flags).arg("--tokenizer").arg(tokenizer));
        let folder = out.join("step_000003");
        for file in ["tokenizer.json", "tokenizer_config.json", "trainer.json", "manifest.json"] {
            assert!(folder.join(file).exists(), "{file}");
        }
        // What others read of it is of these weights and this tokenizer, not of the configuration that it began with.
        let config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        let named = if dtype == "f32" { "float32" } else { "bfloat16" };
        assert_eq!(config["torch_dtype"], named);
        assert_eq!((&config["eos_token_id"], &config["pad_token_id"]), (&json!(0), &json!(1)));
        let model = Model::open(&folder, true).unwrap();
        assert!(model.warnings.is_empty(), "{:?}", model.warnings);
        let ids: Vec<u8> = (0..40i64).flat_map(|i| (i * 7 % 300).to_le_bytes()).collect();
        let (inputs, outputs) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
        write(&inputs, [("input_ids", DType::I64, &[2, 20][..], ids.as_slice())], &BTreeMap::new()).unwrap();
        let run = ["--want", "logits,loss", "--dtype", dtype];
        good(
            program()
                .arg("run")
                .arg(&folder)
                .arg("--inputs")
                .arg(&inputs)
                .arg("--outputs")
                .arg(&outputs)
                .args(run),
        );
        let logits = Checkpoint::open(&outputs).unwrap();
        assert_eq!(logits.get("logits").unwrap().shape(), [2, 20, 320]);
        // What is read is not written over.
        let again = program()
            .arg("run")
            .arg(&folder)
            .arg("--inputs")
            .arg(&inputs)
            .arg("--outputs")
            .arg(&inputs)
            .output()
            .unwrap();
        assert!(
            !again.status.success() && stderr(&again).contains("name another file"),
            "{}",
            stderr(&again)
        );
        let weights = folder.join("model.safetensors");
        let over = program()
            .arg("run")
            .arg(&folder)
            .arg("--inputs")
            .arg(&inputs)
            .arg("--outputs")
            .arg(&weights)
            .output()
            .unwrap();
        assert!(!over.status.success() && stderr(&over).contains("name another file"), "{}", stderr(&over));
        // And a run can start from it, and keeps what its makers recommend.
        let recommended = "{\"temperature\": 0.5}";
        fs::write(folder.join("generation_config.json"), recommended).unwrap();
        let more = dir.path().join(format!("{dtype}-more"));
        let mut c = crate::train::fixture::command(&more);
        c.arg("--model").arg(&folder).arg("--data").arg(crate::train::fixture::shared().join("run/data"));
        good(c.args(["--steps", "2", "--seq", "32", "--batch", "2"]));
        assert!(more.join("step_000002/tokenizer.json").exists());
        let mut on = crate::train::fixture::command(&more);
        good(on.args(["--resume", "--steps", "3"]));
        for step in ["step_000002", "step_000003"] {
            let kept = fs::read_to_string(more.join(step).join("generation_config.json")).unwrap();
            assert_eq!(kept, recommended, "{step}");
        }
    }
}
