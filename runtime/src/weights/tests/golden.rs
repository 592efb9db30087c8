//! Files that another library wrote, where the folder of golden cases is at hand.

use super::*;

#[test]
fn golden_files_open_and_fit_together() {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared");
    let shared = std::env::var_os("ASTRAI_SHARED").map_or(beside, PathBuf::from);
    let model = shared.join("golden/llama");
    if !model.is_dir() {
        println!("skipped: no golden cases at hand (ASTRAI_SHARED names their folder)");
        return;
    }
    let weights = Checkpoint::open(&model).expect("the model");
    let golden = Checkpoint::open(&model.join("golden.safetensors")).expect("its golden file");
    let ids = golden.get("input_ids").expect("input_ids");
    assert_eq!((ids.dtype(), ids.shape()), (DType::I64, &[2, 21][..]));
    let vocabulary = weights.get("model.embed_tokens.weight").expect("embeddings").shape()[0] as i64;
    assert!(ids.to_i64().expect("ids").iter().all(|id| (0..vocabulary).contains(id)));
    let mut gradients: Vec<(String, Vec<usize>)> = Vec::new();
    for name in golden.names() {
        let view = golden.get(name).expect("named");
        if let Some(weight) = name.strip_prefix("grad.") {
            gradients.push((weight.to_string(), view.shape().to_vec()));
        }
        if view.dtype().is_float() {
            let mut values = vec![0f32; view.elements()];
            view.to_f32(&mut values).expect("floats");
            assert!(values.iter().all(|x| x.is_finite()), "{name}");
        }
    }
    assert!(!gradients.is_empty());
    weights.check(&gradients, &|_| false).expect("a gradient for every weight");
}
