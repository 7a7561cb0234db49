{{/* How much is a Kubernetes quantity, and what limit follows from the memory for samples? */}}

{{/* 4Gi, 1500M, 1.5G or a number -> bytes. values.schema.json lets nothing else through. */}}
{{- define "refill.bytes" -}}
{{- $text := ternary . (toString (int64 .)) (kindIs "string" .) -}}
{{- $factors := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $factors (regexFind "[A-Za-z]*$" $text)) | int64 -}}
{{- end }}

{{- define "refill.memoryBytes" -}}
{{- $bytes := include "refill.bytes" .Values.memory -}}
{{- if lt (int64 $bytes) 1048576 -}}
{{- fail (printf "memory: %v is less than 1Mi; write for example 4Gi" .Values.memory) -}}
{{- end -}}
{{- $bytes -}}
{{- end }}

{{/* What the benchmarks hold a pod to, memory_bytes + 15 % + 200 MB, what answers may take beyond the usual, and extraMemory;
rounded up to Mi. */}}
{{- define "refill.memoryLimit" -}}
{{- $memory := include "refill.memoryBytes" . | float64 -}}
{{- $sending := include "refill.bytes" .Values.settings.sending_bytes | float64 -}}
{{- $answers := maxf 0.0 (subf $sending (maxf 67108864.0 (divf $memory 10.0))) -}}
{{- $promised := addf (mulf $memory 1.15) 200000000 $answers -}}
{{- $limit := addf $promised (include "refill.bytes" .Values.extraMemory | float64) -}}
{{- divf $limit 1048576 | ceil | int64 }}Mi
{{- end }}

{{/* (root, requests or limits): those that were given, and memory. A pinned tier in an emptyDir asks for its disk, or the
scheduler puts the pod where there is none. A limit that was given is the request, too, so none is made up beside it. */}}
{{- define "refill.resources" -}}
{{- $root := index . 0 -}}
{{- $disk := $root.Values.pinnedDisk -}}
{{- $given := index $root.Values.resources (index . 1) -}}
{{- if hasKey $given "memory" -}}
{{- fail (printf "resources.%s.memory: it follows from memory and extraMemory; set those" (index . 1)) -}}
{{- end -}}
{{- $made := dict "memory" (include "refill.memoryLimit" $root) -}}
{{- if and (eq (index . 1) "requests") $disk.enabled (not $disk.persistent) (not (hasKey $root.Values.resources.limits "ephemeral-storage")) -}}
{{- $made = merge $made (dict "ephemeral-storage" (get $given "ephemeral-storage" | default (include "refill.text" $disk.size))) -}}
{{- end -}}
{{ merge $made $given | toYaml }}
{{- end }}
